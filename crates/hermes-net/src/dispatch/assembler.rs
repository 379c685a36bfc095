//! Writes eBPF programs instruction by instruction (RFC 9669).
//!
//! In: operations with registers, constants and labels. Out: instructions as the kernel takes them. Never: what a program does.

/// One instruction: an opcode, two registers, an offset and a constant.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Instruction {
    opcode: u8,
    /// The destination in the low four bits, the source in the high ones.
    registers: u8,
    offset: i16,
    constant: i32,
}

/// A register. Calls keep R6 to R9, and use R1 to R5 as arguments and R0 for the outcome. R10 is the end of the stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Register {
    R0,
    R1,
    R2,
    R3,
    R4,
    R5,
    R6,
    R7,
    R8,
    R9,
    Stack,
}

/// Arithmetic with 64 bits.
#[derive(Clone, Copy, Debug)]
pub(super) enum Operation {
    Add = 0x00,
    Sub = 0x10,
    Mul = 0x20,
    And = 0x50,
    ShiftLeft = 0x60,
    ShiftRight = 0x70,
    Modulo = 0x90,
    Xor = 0xa0,
    Move = 0xb0,
}

/// When a jump is taken.
#[derive(Clone, Copy, Debug)]
pub(super) enum Condition {
    Equal = 0x10,
    NotEqual = 0x50,
    SignedLess = 0xc0,
}

/// A place in a program. It is used before or after it is set.
#[derive(Clone, Copy, Debug)]
pub(super) struct Label(usize);

/// The classes of opcodes, and where an operand comes from.
const CLASS_LOAD: u8 = 0x00;
const CLASS_LOAD_REGISTER: u8 = 0x61;
const CLASS_STORE_REGISTER: u8 = 0x63;
const CLASS_ATOMIC_64: u8 = 0xdb;
const CLASS_JUMP: u8 = 0x05;
const CLASS_ALU_64: u8 = 0x07;
const FROM_REGISTER: u8 = 0x08;
const SIZE_8: u8 = 0x10;
const SIZE_32: u8 = 0x00;
const SIZE_64: u8 = 0x18;
const LOAD_64_CONSTANT: u8 = CLASS_LOAD | SIZE_64;
const CALL: u8 = CLASS_JUMP | 0x80;
const EXIT: u8 = CLASS_JUMP | 0x90;
const ATOMIC_FETCH_AND_ADD: i32 = 0x01;
const ATOMIC_AND: i32 = 0x50;
/// In the source register of a 64-bit constant: the constant is the descriptor of a map.
const IS_MAP: u8 = 1;

/// A program in the making.
#[derive(Debug, Default)]
pub(super) struct Assembler {
    code: Vec<Instruction>,
    /// The position of each label, once it is set.
    labels: Vec<Option<usize>>,
    /// The jumps to each label.
    jumps: Vec<(usize, Label)>,
}

impl Assembler {
    fn add(&mut self, opcode: u8, to: u8, from: u8, offset: i16, constant: i32) {
        self.code.push(Instruction { opcode, registers: to | from << 4, offset, constant });
    }

    /// `to = to OPERATION constant`.
    pub(super) fn with_constant(&mut self, operation: Operation, to: Register, constant: i32) {
        self.add(CLASS_ALU_64 | operation as u8, to.number(), 0, 0, constant);
    }

    /// `to = to OPERATION from`.
    pub(super) fn with_register(&mut self, operation: Operation, to: Register, from: Register) {
        self.add(CLASS_ALU_64 | FROM_REGISTER | operation as u8, to.number(), from.number(), 0, 0);
    }

    /// Any constant of 64 bits.
    pub(super) fn load_constant(&mut self, to: Register, constant: u64) {
        let halves = [constant as u32, (constant >> 32) as u32].map(u32::cast_signed);
        self.add(LOAD_64_CONSTANT, to.number(), 0, 0, halves[0]);
        self.add(0, 0, 0, 0, halves[1]);
    }

    /// The map with this descriptor.
    pub(super) fn load_map(&mut self, to: Register, map: u32) {
        self.add(LOAD_64_CONSTANT, to.number(), IS_MAP, 0, map.cast_signed());
        self.add(0, 0, 0, 0, 0);
    }

    /// `to = *(u8 *)(from + offset)`.
    pub(super) fn load_8(&mut self, to: Register, from: Register, offset: i16) {
        self.add(CLASS_LOAD_REGISTER | SIZE_8, to.number(), from.number(), offset, 0);
    }

    /// `to = *(u32 *)(from + offset)`.
    pub(super) fn load_32(&mut self, to: Register, from: Register, offset: i16) {
        self.add(CLASS_LOAD_REGISTER | SIZE_32, to.number(), from.number(), offset, 0);
    }

    /// `to = *(u64 *)(from + offset)`.
    pub(super) fn load_64(&mut self, to: Register, from: Register, offset: i16) {
        self.add(CLASS_LOAD_REGISTER | SIZE_64, to.number(), from.number(), offset, 0);
    }

    /// `*(u32 *)(to + offset) = from`.
    pub(super) fn store_32(&mut self, to: Register, offset: i16, from: Register) {
        self.add(CLASS_STORE_REGISTER | SIZE_32, to.number(), from.number(), offset, 0);
    }

    /// `*(u64 *)(to + offset) = from`.
    pub(super) fn store_64(&mut self, to: Register, offset: i16, from: Register) {
        self.add(CLASS_STORE_REGISTER | SIZE_64, to.number(), from.number(), offset, 0);
    }

    /// Adds to a 64-bit number in memory, and puts the number before into `addend`. Atomic.
    pub(super) fn fetch_and_add(&mut self, to: Register, offset: i16, addend: Register) {
        self.add(CLASS_ATOMIC_64, to.number(), addend.number(), offset, ATOMIC_FETCH_AND_ADD);
    }

    /// Keeps the bits of a 64-bit number in memory that `mask` has, too. Atomic.
    pub(super) fn keep_bits(&mut self, to: Register, offset: i16, mask: Register) {
        self.add(CLASS_ATOMIC_64, to.number(), mask.number(), offset, ATOMIC_AND);
    }

    pub(super) fn label(&mut self) -> Label {
        self.labels.push(None);
        Label(self.labels.len() - 1)
    }

    /// The label means the next instruction.
    pub(super) fn set(&mut self, label: Label) {
        self.labels[label.0] = Some(self.code.len());
    }

    pub(super) fn jump(&mut self, to: Label) {
        self.jumps.push((self.code.len(), to));
        self.add(CLASS_JUMP, 0, 0, 0, 0);
    }

    /// Jumps if `register CONDITION constant`.
    pub(super) fn jump_if(&mut self, condition: Condition, register: Register, constant: i32, to: Label) {
        self.jumps.push((self.code.len(), to));
        self.add(CLASS_JUMP | condition as u8, register.number(), 0, 0, constant);
    }

    /// Jumps if `register CONDITION other`.
    pub(super) fn jump_if_register(&mut self, condition: Condition, register: Register, other: Register, to: Label) {
        self.jumps.push((self.code.len(), to));
        self.add(CLASS_JUMP | FROM_REGISTER | condition as u8, register.number(), other.number(), 0, 0);
    }

    /// Calls a helper function of the kernel (linux/bpf.h: `___BPF_FUNC_MAPPER`).
    pub(super) fn call(&mut self, function: i32) {
        self.add(CALL, 0, 0, 0, function);
    }

    pub(super) fn exit(&mut self) {
        self.add(EXIT, 0, 0, 0, 0);
    }

    /// The program, with the distance of each jump. `None`: a label is not set, or too far away.
    pub(super) fn finish(mut self) -> Option<Vec<Instruction>> {
        for (at, label) in self.jumps {
            let target = self.labels[label.0]?;
            let distance = target.checked_signed_diff(at + 1)?;
            self.code[at].offset = i16::try_from(distance).ok()?;
        }
        Some(self.code)
    }
}

impl Register {
    fn number(self) -> u8 {
        self as u8
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn instructions_have_the_bytes_of_the_standard() {
        // As `llvm-objdump` prints them for `r6 = r1; r0 = *(u64 *)(r6 + 8); if r0 == 0 goto +1; call 1; exit`.
        let mut code = Assembler::default();
        code.with_register(Operation::Move, Register::R6, Register::R1);
        code.load_64(Register::R0, Register::R6, 8);
        let end = code.label();
        code.jump_if(Condition::Equal, Register::R0, 0, end);
        code.call(1);
        code.set(end);
        code.exit();
        let bytes: Vec<[u8; 2]> = code.finish().unwrap().iter().map(|one| [one.opcode, one.registers]).collect();
        assert_eq!(bytes, [[0xbf, 0x16], [0x79, 0x60], [0x15, 0x00], [0x85, 0x00], [0x95, 0x00]]);
    }

    #[test]
    fn a_jump_leads_to_its_label() {
        let mut code = Assembler::default();
        let (begin, end) = (code.label(), code.label());
        code.set(begin);
        code.jump(end);
        code.jump(begin);
        code.set(end);
        code.exit();
        let offsets: Vec<i16> = code.finish().unwrap().iter().map(|one| one.offset).collect();
        assert_eq!(offsets, [1, -2, 0]);
        let mut code = Assembler::default();
        let never = code.label();
        code.jump(never);
        assert_eq!(code.finish(), None);
    }
}
