//! Tests of `traceparent`: the specification's rules one by one, and round trips.

#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;

/// The example of the specification.
const EXAMPLE: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

fn parse(value: &str) -> Result<Traceparent, TraceparentError> {
    Traceparent::parse(value.as_bytes())
}

#[test]
fn the_example_of_the_specification() {
    let parent = parse(EXAMPLE).unwrap();
    assert_eq!(parent.trace_id(), 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736);
    assert_eq!(parent.span_id(), 0x00f0_67aa_0ba9_02b7);
    assert!(parent.sampled());
    assert_eq!(parent.render(), EXAMPLE.as_bytes());
    assert_eq!(parent.to_string(), EXAMPLE);
}

#[test]
fn a_child_keeps_the_trace_and_the_flags() {
    let parent = parse(EXAMPLE).unwrap();
    let child = parent.child(0xb7ad_6b71_6920_3331);
    assert_eq!(child.to_string(), "00-4bf92f3577b34da6a3ce929d0e0e4736-b7ad6b7169203331-01");
    assert_eq!(parent.child(0).span_id(), 1, "a span id of zeros is forbidden");
}

#[test]
fn a_new_trace() {
    assert_eq!(Traceparent::root(0, 0, false).to_string(), format!("00-{:032x}-{:016x}-02", 1, 1));
    assert!(Traceparent::root(5, 6, true).sampled());
}

#[test]
fn flags_that_nobody_has_defined_are_not_sent_on() {
    let with_flags = |flags: &str| parse(&format!("{}{flags}", &EXAMPLE[..53])).unwrap().to_string();
    assert!(with_flags("ff").ends_with("-03"));
    assert!(with_flags("02").ends_with("-02"));
    assert!(with_flags("fc").ends_with("-00"));
}

#[test]
fn later_versions_give_what_is_known_of_them() {
    let later = EXAMPLE.replacen("00-", "cc-", 1);
    for value in [later.clone(), format!("{later}-"), format!("{later}-what-the-future-brings")] {
        assert_eq!(parse(&value).unwrap().to_string(), EXAMPLE, "{value}");
    }
    let random = later.replace("-01", "-03");
    assert_eq!(parse(&random).unwrap().to_string(), EXAMPLE, "only `sampled` is known there");
    assert_eq!(parse(&format!("{later}x")), Err(TraceparentError::Character(55)));
}

#[test]
fn refusals() {
    use TraceparentError::*;
    let zero_trace = format!("00-{:032}-00f067aa0ba902b7-01", 0);
    let zero_parent = format!("00-4bf92f3577b34da6a3ce929d0e0e4736-{:016}-01", 0);
    for (value, error) in [
        ("", Length(0)),
        ("00", Length(2)),
        (&EXAMPLE[..54], Length(54)),
        (&format!("{EXAMPLE}-"), Length(56)),
        (&format!("{EXAMPLE} "), Length(56)),
        (&EXAMPLE.replacen("00-", "ff-", 1), Version),
        (&EXAMPLE.replacen("00-", "0g-", 1), Character(1)),
        (&EXAMPLE.replacen("00-", "00_", 1), Character(2)),
        (&EXAMPLE.replacen("4bf", "4BF", 1), Character(4)),
        (&EXAMPLE.replacen("6-0", "6 0", 1), Character(35)),
        (&EXAMPLE.replacen("00f067", "00f06-", 1), Character(41)),
        (&EXAMPLE.replacen("-01", "+01", 1), Character(52)),
        (&EXAMPLE.replacen("-01", "-0.", 1), Character(54)),
        (&EXAMPLE.replacen("4bf", "é4", 1)[..], Character(3)),
        (&zero_trace, ZeroTrace),
        (&zero_parent, ZeroParent),
    ] {
        assert_eq!(parse(value), Err(error), "{value}");
    }
}

proptest! {
    #[test]
    fn round_trip(trace: u128, span: u64, child: u64, sampled: bool) {
        let parent = Traceparent::root(trace, span, sampled).child(child);
        prop_assert_eq!(Traceparent::parse(&parent.render()), Ok(parent));
        prop_assert_eq!(parent.to_string().into_bytes(), parent.render().to_vec());
    }

    /// A wrong character at any position is an error, or harmless: an accepted value renders the same.
    #[test]
    fn one_character_replaced(at in 0..LEN, byte: u8) {
        let mut value = EXAMPLE.as_bytes().to_vec();
        value[at] = byte;
        if let Ok(parent) = Traceparent::parse(&value) {
            // Version and flags are replaced by those that we support.
            prop_assert_eq!(&parent.render()[3..53], &value[3..53]);
        }
    }

    #[test]
    fn any_bytes(value: Vec<u8>) {
        if let Ok(parent) = Traceparent::parse(&value) {
            prop_assert_eq!(Traceparent::parse(&parent.render()), Ok(parent));
        }
    }
}
