//! The program by which the kernel chooses the worker of a new connection (paper 003, Algorithm 2).
//!
//! In: the shared table, and the sockets of a listener by worker; for QUIC, also the connections that have a worker. Out: instructions.
//! The hash of the connection picks one of the workers that the scheduler selected: an idle one, as long as there is one. The program
//! passes over a worker whose loop stands still at that moment: it reads the latest turn from the table, so nobody has to watch the
//! workers while all of them wait. Connections of confined listeners come to the workers of the sandbox. Never: a refused connection; where the program chooses
//! nothing, the kernel hashes.

pub(super) mod quic;

use super::assembler::{Assembler, Condition, Instruction, Label, Operation, Register};
use super::table::{Groups, offset};

/// linux/bpf.h: `struct sk_reuseport_md`.
const CONTEXT_PROTOCOL: i16 = 20;
const CONTEXT_HASH: i16 = 32;
/// IEEE 802: the type of a frame with IPv6.
const ETHERTYPE_V6: u16 = 0x86dd;
/// The last four bytes of the destination in the headers of IP.
const DESTINATION_V4: i32 = 16;
const DESTINATION_V6: i32 = 36;
/// linux/bpf.h: `BPF_HDR_START_NET`.
const FROM_NETWORK_HEADER: i32 = 1;
/// From the golden ratio (Knuth).
const HASH_MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;
/// linux/bpf.h: `___BPF_FUNC_MAPPER`.
const MAP_LOOKUP_ELEM: i32 = 1;
const KTIME_GET_NS: i32 = 5;
const LOAD_BYTES_RELATIVE: i32 = 68;
const SK_SELECT_REUSEPORT: i32 = 82;
/// linux/bpf.h: `enum sk_action`. Without a selected socket, the kernel hashes.
const SK_PASS: i32 = 1;

/// The most workers of a set that are passed over, because they stand still or have no socket.
const ATTEMPTS: usize = 8;

/// Places on the stack.
const KEY: i16 = -8;
const POSITION: i16 = -16;
const PAIRS: i16 = -24;
const NIBBLES: i16 = -32;
const BYTES: i16 = -40;
const HALFWORDS: i16 = -48;
const WORDS: i16 = -56;
/// The number of the first worker in the group.
const FIRST: i16 = -64;
/// The workers that may get a connection of this listener. The places between are those of QUIC.
const ALLOWED: i16 = -88;

/// The maps of a program by their descriptors, and what it is built for.
#[derive(Clone, Copy)]
pub(super) struct Build {
    pub(super) table: u32,
    pub(super) sockets: u32,
    pub(super) groups: Groups,
    /// The port of the listener.
    pub(super) port: u16,
    /// The bit of this program among those of confined listeners. `None`: its listener is never confined.
    pub(super) bit: Option<u8>,
}

/// Builds the program for a listener over TCP.
pub(super) fn tcp(build: &Build) -> Option<Vec<Instruction>> {
    let mut code = Assembler::default();
    let (fallback, chosen) = (code.label(), code.label());
    begin(&mut code, build, fallback)?;
    choose(&mut code, build, fallback, chosen);
    code.set(fallback);
    code.set(chosen);
    end(&mut code);
    code.finish()
}

/// Keeps the context in R6, the group of the connection in R7, and the hash in R8.
fn begin(code: &mut Assembler, build: &Build, fallback: Label) -> Option<()> {
    use Register::{R0, R1, R2, R6, R7, R8, Stack};
    code.with_register(Operation::Move, R6, R1);
    code.load_32(R8, R6, CONTEXT_HASH);
    let Groups { count, size, by_destination } = build.groups;
    if count == 1 {
        code.with_constant(Operation::Move, R2, 0);
    } else if by_destination {
        hash_destination(code, build.port, fallback);
        code.with_constant(Operation::Mul, R2, i32::try_from(count).ok()?);
        code.with_constant(Operation::ShiftRight, R2, 32);
    } else {
        // The hash is a fraction of 32 bits: the integer part of its product is the group, and the rest hashes within the group.
        code.with_constant(Operation::Mul, R8, i32::try_from(count).ok()?);
        code.with_register(Operation::Move, R2, R8);
        code.with_constant(Operation::ShiftRight, R2, 32);
        code.with_constant(Operation::ShiftLeft, R8, 32);
        code.with_constant(Operation::ShiftRight, R8, 32);
    }
    code.store_32(Stack, KEY, R2);
    code.with_constant(Operation::Mul, R2, i32::try_from(size).ok()?);
    code.store_64(Stack, FIRST, R2);
    lookup(code, build.table);
    code.jump_if(Condition::Equal, R0, 0, fallback);
    code.with_register(Operation::Move, R7, R0);
    Some(())
}

/// Puts a hash of 32 bits into R2: of the port, and of the last four bytes of the destination address.
fn hash_destination(code: &mut Assembler, port: u16, fallback: Label) {
    use Register::{R0, R1, R2, R3, R4, R5, R6, Stack};
    let (v6, ready) = (code.label(), code.label());
    code.load_32(R1, R6, CONTEXT_PROTOCOL);
    code.with_constant(Operation::Move, R2, DESTINATION_V4);
    code.jump_if(Condition::Equal, R1, i32::from(ETHERTYPE_V6.to_be()), v6);
    code.jump(ready);
    code.set(v6);
    code.with_constant(Operation::Move, R2, DESTINATION_V6);
    code.set(ready);
    code.with_register(Operation::Move, R1, R6);
    code.with_register(Operation::Move, R3, Stack);
    code.with_constant(Operation::Add, R3, i32::from(POSITION));
    code.with_constant(Operation::Move, R4, 4);
    code.with_constant(Operation::Move, R5, FROM_NETWORK_HEADER);
    code.call(LOAD_BYTES_RELATIVE);
    code.jump_if(Condition::NotEqual, R0, 0, fallback);
    code.load_32(R2, Stack, POSITION);
    code.load_constant(R1, u64::from(port) << 16);
    code.with_register(Operation::Xor, R2, R1);
    code.load_constant(R1, HASH_MULTIPLIER);
    code.with_register(Operation::Mul, R2, R1);
    // The middle bits depend on all of the address.
    code.with_constant(Operation::ShiftRight, R2, 16);
    code.with_constant(Operation::ShiftLeft, R2, 32);
    code.with_constant(Operation::ShiftRight, R2, 32);
}

fn end(code: &mut Assembler) {
    code.with_constant(Operation::Move, Register::R0, SK_PASS);
    code.exit();
}

/// Selects a socket by the mode, and goes to `chosen` with its number on the stack. Without a choice, goes to `fallback`.
fn choose(code: &mut Assembler, build: &Build, fallback: Label, chosen: Label) {
    use Register::{R0, R1, R2, R7, R9, Stack};
    let (round_robin, first, others, only) = (code.label(), code.label(), code.label(), code.label());
    let (claimed, busy, standing) = (code.label(), code.label(), code.label());
    code.load_64(R1, R7, offset::MODE);
    code.jump_if(Condition::Equal, R1, super::Mode::RoundRobin as i32, round_robin);
    code.jump_if(Condition::Equal, R1, super::Mode::First as i32, first);
    code.jump_if(Condition::NotEqual, R1, super::Mode::Directed as i32, fallback);
    keep_allowed(code, build);
    // A worker that waits for events can accept the connection at once.
    code.load_64(R9, R7, offset::SELECTED);
    code.load_64(R1, R7, offset::IDLE);
    code.with_register(Operation::And, R9, R1);
    only_allowed(code);
    pick_that_turns(code, build.sockets, busy, claimed);
    // The next connection goes to another idle worker, even if this one has not woken up by then.
    code.set(claimed);
    code.load_64(R2, Stack, POSITION);
    code.with_constant(Operation::Move, R1, 1);
    code.with_register(Operation::ShiftLeft, R1, R2);
    code.with_constant(Operation::Xor, R1, -1);
    code.keep_bits(R7, offset::IDLE, R1);
    code.jump(chosen);
    code.set(busy);
    code.load_64(R9, R7, offset::SELECTED);
    only_allowed(code);
    pick_that_turns(code, build.sockets, others, chosen);
    code.set(others);
    // Those that turn, but have more to do than others.
    code.load_64(R9, R7, offset::ALL);
    code.load_64(R1, R7, offset::SELECTED);
    code.with_register(Operation::Xor, R9, R1);
    only_allowed(code);
    pick_that_turns(code, build.sockets, standing, chosen);
    code.set(standing);
    if let Some(bit) = build.bit {
        // All of them stand still. The kernel would hash a confined connection to a worker of the others.
        jump_unless_confined(code, bit, fallback);
        code.load_64(R9, Stack, ALLOWED);
        pick(code);
        code.load_64(R1, Stack, FIRST);
        code.with_register(Operation::Add, R1, R0);
        code.store_32(Stack, KEY, R1);
        code.jump(only);
    } else {
        code.jump(fallback);
    }
    code.set(round_robin);
    code.with_constant(Operation::Move, R1, 1);
    code.fetch_and_add(R7, offset::COUNTER, R1);
    code.load_64(R2, R7, offset::WORKERS);
    code.with_register(Operation::Modulo, R1, R2);
    code.load_64(R2, Stack, FIRST);
    code.with_register(Operation::Add, R1, R2);
    code.store_32(Stack, KEY, R1);
    code.jump(only);
    code.set(first);
    code.with_constant(Operation::Move, R1, 0);
    code.store_32(Stack, KEY, R1);
    code.set(only);
    select(code, build.sockets);
    code.jump_if(Condition::Equal, R0, 0, chosen);
    code.jump(fallback);
}

/// Puts the workers that may get the connection on the stack: those of the sandbox for a confined listener, and the others for any
/// other listener.
fn keep_allowed(code: &mut Assembler, build: &Build) {
    use Register::{R1, R2, R7, Stack};
    let ordinary = code.label();
    code.load_64(R1, R7, offset::ALL);
    code.load_64(R2, R7, offset::SANDBOX);
    code.with_register(Operation::Xor, R1, R2);
    code.store_64(Stack, ALLOWED, R1);
    if let Some(bit) = build.bit {
        jump_unless_confined(code, bit, ordinary);
        code.load_64(R2, R7, offset::SANDBOX);
        code.store_64(Stack, ALLOWED, R2);
    }
    code.set(ordinary);
}

/// The kernel refuses code that nothing leads to, so this is for programs with a bit alone.
fn jump_unless_confined(code: &mut Assembler, bit: u8, to: Label) {
    use Register::{R1, R7};
    code.load_64(R1, R7, offset::SANDBOX);
    code.jump_if(Condition::Equal, R1, 0, to);
    code.load_64(R1, R7, offset::CONFINED);
    code.with_constant(Operation::ShiftRight, R1, bit.into());
    code.with_constant(Operation::And, R1, 1);
    code.jump_if(Condition::Equal, R1, 0, to);
}

/// Leaves the workers in R9 that may get the connection.
fn only_allowed(code: &mut Assembler) {
    code.load_64(Register::R1, Register::Stack, ALLOWED);
    code.with_register(Operation::And, Register::R9, Register::R1);
}

/// Selects a socket of a worker in R9 whose loop turns, and goes to `chosen`; without one, to `none`.
fn pick_that_turns(code: &mut Assembler, sockets: u32, none: Label, chosen: Label) {
    use Register::{R0, R1, R2, R7, R9, Stack};
    for _ in 0..ATTEMPTS {
        let (available, next) = (code.label(), code.label());
        code.jump_if(Condition::Equal, R9, 0, none);
        pick(code);
        code.store_64(Stack, POSITION, R0);
        code.load_64(R1, Stack, FIRST);
        code.with_register(Operation::Add, R1, R0);
        code.store_32(Stack, KEY, R1);
        // The row of the worker.
        code.with_constant(Operation::ShiftLeft, R0, offset::ROW_SHIFT);
        code.with_register(Operation::Add, R0, R7);
        code.load_64(R1, R0, offset::FIRST_ROW + offset::PARKED);
        code.jump_if(Condition::NotEqual, R1, 0, available);
        code.load_64(R1, R0, offset::FIRST_ROW + offset::TURNED);
        code.store_64(Stack, PAIRS, R1);
        code.call(KTIME_GET_NS);
        code.load_64(R1, Stack, PAIRS);
        code.with_register(Operation::Sub, R0, R1);
        // Signed: the turn may be later than this look at the clock.
        code.load_64(R2, R7, offset::HUNG_AFTER);
        code.jump_if_register(Condition::SignedLess, R0, R2, available);
        code.jump(next);
        code.set(available);
        select(code, sockets);
        code.jump_if(Condition::Equal, R0, 0, chosen);
        code.set(next);
        code.load_64(R2, Stack, POSITION);
        code.with_constant(Operation::Move, R1, 1);
        code.with_register(Operation::ShiftLeft, R1, R2);
        code.with_register(Operation::Xor, R9, R1);
    }
    code.jump(none);
}

/// Puts the address of the group whose number is on the stack into R0, or 0.
fn lookup(code: &mut Assembler, table: u32) {
    use Register::{R1, R2, Stack};
    code.load_map(R1, table);
    code.with_register(Operation::Move, R2, Stack);
    code.with_constant(Operation::Add, R2, i32::from(KEY));
    code.call(MAP_LOOKUP_ELEM);
}

/// Selects the socket whose number is on the stack. R0 is 0 if there is one.
fn select(code: &mut Assembler, sockets: u32) {
    use Register::{R1, R2, R3, R4, R6, Stack};
    code.with_register(Operation::Move, R1, R6);
    code.load_map(R2, sockets);
    code.with_register(Operation::Move, R3, Stack);
    code.with_constant(Operation::Add, R3, i32::from(KEY));
    code.with_constant(Operation::Move, R4, 0);
    code.call(SK_SELECT_REUSEPORT);
}

/// Picks one of the bits in R9, which has one at least, by the 32-bit hash in R8. R0 is its position.
///
/// The sums of bits of growing fields count the bits. Then the same sums lead to the bit with the wanted rank: at each field, the
/// rank either lies within its lower half, or the bits of that half are subtracted. There are no branches, so the verifier has one path.
fn pick(code: &mut Assembler) {
    use Register::{R0, R1, R2, R3, R4, R8, R9, Stack};
    // Pairs: x - ((x >> 1) & 0x55...).
    code.with_register(Operation::Move, R1, R9);
    code.with_constant(Operation::ShiftRight, R1, 1);
    code.load_constant(R2, 0x5555_5555_5555_5555);
    code.with_register(Operation::And, R1, R2);
    code.with_register(Operation::Move, R3, R9);
    code.with_register(Operation::Sub, R3, R1);
    code.store_64(Stack, PAIRS, R3);
    // Nibbles: (x & 0x33...) + ((x >> 2) & 0x33...). A sum of two pairs needs all bits of its pair, so each is masked alone.
    code.load_constant(R2, 0x3333_3333_3333_3333);
    code.with_register(Operation::Move, R1, R3);
    code.with_constant(Operation::ShiftRight, R1, 2);
    code.with_register(Operation::And, R1, R2);
    code.with_register(Operation::And, R3, R2);
    code.with_register(Operation::Add, R3, R1);
    code.store_64(Stack, NIBBLES, R3);
    // Wider fields: (x + (x >> width)) & mask.
    for (width, mask, place) in
        [(4, 0x0f0f_0f0f_0f0f_0f0f, BYTES), (8, 0x00ff_00ff_00ff_00ff, HALFWORDS), (16, 0x0000_ffff_0000_ffff, WORDS)]
    {
        code.with_register(Operation::Move, R1, R3);
        code.with_constant(Operation::ShiftRight, R1, width);
        code.with_register(Operation::Add, R3, R1);
        code.load_constant(R2, mask);
        code.with_register(Operation::And, R3, R2);
        code.store_64(Stack, place, R3);
    }
    code.with_register(Operation::Move, R1, R3);
    code.with_constant(Operation::ShiftRight, R1, 32);
    code.with_register(Operation::Add, R3, R1);
    code.with_constant(Operation::And, R3, 0xff);
    // R3: the rank, hash * count / 2^32, from 0 to count - 1.
    code.with_register(Operation::Mul, R3, R8);
    code.with_constant(Operation::ShiftRight, R3, 32);
    code.with_constant(Operation::Move, R0, 0);
    let fields = [(Some(WORDS), 0xff, 5), (Some(HALFWORDS), 0xff, 4), (Some(BYTES), 0xff, 3)];
    for (place, mask, width) in fields.into_iter().chain([(Some(NIBBLES), 0xf, 2), (Some(PAIRS), 3, 1), (None, 1, 0)]) {
        match place {
            Some(place) => code.load_64(R1, Stack, place),
            None => code.with_register(Operation::Move, R1, R9),
        }
        code.with_register(Operation::ShiftRight, R1, R0);
        code.with_constant(Operation::And, R1, mask);
        // R4: 1 if the rank is beyond these bits, or else 0. The verifier would follow both values of an arithmetic shift's mask.
        code.with_register(Operation::Move, R4, R1);
        code.with_constant(Operation::Sub, R4, 1);
        code.with_register(Operation::Sub, R4, R3);
        code.with_constant(Operation::ShiftRight, R4, 63);
        code.with_register(Operation::Mul, R1, R4);
        code.with_register(Operation::Sub, R3, R1);
        code.with_constant(Operation::ShiftLeft, R4, width);
        code.with_register(Operation::Add, R0, R4);
    }
}

/// What `pick` does, for the kernel's test of a program: the bitmap, the hash and the position are the first words of the table.
#[cfg(test)]
pub(super) fn pick_alone(table: u32) -> Option<Vec<Instruction>> {
    use Register::{R0, R7, R8, R9};
    let mut code = Assembler::default();
    let end = code.label();
    code.with_constant(Operation::Move, R0, 0);
    code.store_32(Register::Stack, KEY, R0);
    lookup(&mut code, table);
    code.jump_if(Condition::Equal, R0, 0, end);
    code.with_register(Operation::Move, R7, R0);
    code.load_64(R9, R7, 0);
    code.load_64(R8, R7, 8);
    code.jump_if(Condition::Equal, R9, 0, end);
    pick(&mut code);
    code.store_64(R7, 16, R0);
    code.set(end);
    code.with_constant(Operation::Move, R0, 0);
    code.exit();
    code.finish()
}
