//! The program for a listener over QUIC: a datagram comes to the worker of its connection (RFC 9000, Section 5.2).
//!
//! In: a datagram, the shared table, the sockets by worker. Out: the socket that the connection id names, if this process has issued the
//! id. A client chooses the id of its first packets: the first one is dispatched as a TCP connection is, and a map keeps the choice for
//! the packets with the same id. Never: a datagram that is dropped; where the program chooses nothing, the kernel hashes the addresses.

use super::{Build, KEY, choose, end, select};
use crate::dispatch::Mode;
use crate::dispatch::assembler::{Assembler, Condition, Instruction, Label, Operation, Register};
use crate::dispatch::table::offset;

/// linux/bpf.h: `___BPF_FUNC_MAPPER`.
const MAP_LOOKUP_ELEM: i32 = 1;
const MAP_UPDATE_ELEM: i32 = 2;
const LOAD_BYTES: i32 = 26;

/// Offsets in a datagram, after the UDP header: RFC 8999, Section 5.
const FIRST_BYTE: i32 = 8;
const ID_OF_SHORT: i32 = FIRST_BYTE + 1;
const ID_LENGTH: i32 = FIRST_BYTE + 5;
const ID_OF_LONG: i32 = FIRST_BYTE + 6;
/// The bit of a long header.
const IS_LONG: i32 = 0x80;
/// Bytes of an id that count: all of those that this node issues.
const LENGTH: i32 = 8;

/// Places on the stack, below those of `choose`.
const ID: i16 = -72;
const BYTE: i16 = -80;

/// Builds the program. `tag` is in the ids that this process issues, after the number of the socket.
pub(in crate::dispatch) fn program(build: &Build, first_ids: u32, tag: u16) -> Option<Vec<Instruction>> {
    use Register::{R0, R1, R2, R3, R4, R7, Stack};
    let mut code = Assembler::default();
    let (fallback, long, client_id, new, chosen) =
        (code.label(), code.label(), code.label(), code.label(), code.label());
    super::begin(&mut code, build, fallback)?;
    let sockets = build.sockets;
    load(&mut code, FIRST_BYTE, BYTE, 1, fallback);
    code.load_8(R1, Stack, BYTE);
    code.with_constant(Operation::And, R1, IS_LONG);
    code.jump_if(Condition::NotEqual, R1, 0, long);
    load(&mut code, ID_OF_SHORT, ID, LENGTH, fallback);
    to_owner(&mut code, sockets, tag, fallback, fallback);
    code.set(long);
    load(&mut code, ID_OF_LONG, ID, LENGTH, fallback);
    load(&mut code, ID_LENGTH, BYTE, 1, fallback);
    code.load_8(R1, Stack, BYTE);
    code.jump_if(Condition::NotEqual, R1, LENGTH, client_id);
    to_owner(&mut code, sockets, tag, client_id, fallback);
    code.set(client_id);
    code.load_map(R1, first_ids);
    pointer(&mut code, R2, ID);
    code.call(MAP_LOOKUP_ELEM);
    code.jump_if(Condition::Equal, R0, 0, new);
    code.load_32(R1, R0, 0);
    code.store_32(Stack, KEY, R1);
    select(&mut code, sockets);
    code.jump_if(Condition::Equal, R0, 0, fallback);
    code.set(new);
    // `First` is for sockets on which all workers wait.
    code.load_64(R1, R7, offset::MODE);
    code.jump_if(Condition::Equal, R1, Mode::First as i32, fallback);
    choose(&mut code, build, fallback, chosen);
    code.set(chosen);
    code.load_map(R1, first_ids);
    pointer(&mut code, R2, ID);
    pointer(&mut code, R3, KEY);
    code.with_constant(Operation::Move, R4, 0);
    code.call(MAP_UPDATE_ELEM);
    code.set(fallback);
    end(&mut code);
    code.finish()
}

/// Copies bytes of the datagram to the stack. A datagram that is too short goes to `fallback`.
fn load(code: &mut Assembler, offset: i32, to: i16, length: i32, fallback: Label) {
    use Register::{R0, R1, R2, R3, R4, R6};
    code.with_register(Operation::Move, R1, R6);
    code.with_constant(Operation::Move, R2, offset);
    pointer(code, R3, to);
    code.with_constant(Operation::Move, R4, length);
    code.call(LOAD_BYTES);
    code.jump_if(Condition::NotEqual, R0, 0, fallback);
}

/// Selects the socket that the id on the stack names, and ends. An id of another process goes to `foreign`, and one without a socket to
/// `fallback`.
fn to_owner(code: &mut Assembler, sockets: u32, tag: u16, foreign: Label, fallback: Label) {
    use Register::{R1, R2, Stack};
    // The id is slot, tag (big-endian) and a random number: as a little-endian word, the tag is in its bits 8 to 23.
    code.load_64(R1, Stack, ID);
    code.with_register(Operation::Move, R2, R1);
    code.with_constant(Operation::ShiftRight, R2, 8);
    code.with_constant(Operation::And, R2, 0xffff);
    code.jump_if(Condition::NotEqual, R2, i32::from(tag.swap_bytes()), foreign);
    code.with_constant(Operation::And, R1, 0xff);
    code.store_32(Stack, KEY, R1);
    select(code, sockets);
    code.jump(fallback);
}

/// The address of a place on the stack.
fn pointer(code: &mut Assembler, to: Register, place: i16) {
    code.with_register(Operation::Move, to, Register::Stack);
    code.with_constant(Operation::Add, to, i32::from(place));
}
