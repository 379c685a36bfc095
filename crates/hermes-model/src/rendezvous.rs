//! Rendezvous hashing: the choice of a member by a key, which everyone who knows the members makes alike.
//!
//! In: a key, and the name of a member. Out: the weight of the member for the key; the highest wins. If a member is added
//! or removed, only its own keys move. Never: a hash that differs between versions, as those of the standard library may.

/// The weight of a member for a key: FNV-1a over key and member, then the finalizer of MurmurHash3. Without the finalizer,
/// keys that differ only in their last character would prefer the same member.
pub fn weight(key: &[u8], member: &str) -> u64 {
    // This byte never occurs in UTF-8, so it separates key and member unambiguously.
    const BETWEEN: u8 = 0xff;
    let bytes = key.iter().chain([&BETWEEN]).chain(member.as_bytes());
    let mut hash =
        bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3));
    for factor in [0xff51_afd7_ed55_8ccd, 0xc4ce_b9fe_1a85_ec53] {
        hash = (hash ^ (hash >> 33)).wrapping_mul(factor);
    }
    hash ^ (hash >> 33)
}

#[cfg(test)]
mod tests {
    use super::weight;

    /// The expected values come from an independent program. A change of the function would move sessions to other
    /// endpoints.
    #[test]
    fn weights_are_the_same_for_every_version() {
        assert_eq!(weight(b"", "192.0.2.1:80"), 0x3ef0_705c_dcce_28ec);
        assert_eq!(weight(b"alice", "192.0.2.1:80"), 0xf0da_552f_9fce_a979);
        assert_eq!(weight(b"alice", "[2001:db8::1]:9443"), 0x89e7_c431_1065_4a2f);
    }

    #[test]
    fn keys_that_resemble_each_other_are_spread_evenly() {
        let endpoints = ["10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80", "10.0.0.4:80"];
        let mut shares = [0; 4];
        for number in 0..4_000 {
            let key = format!("user-{number}");
            let choice = (0..4).max_by_key(|index: &usize| weight(key.as_bytes(), endpoints[*index]));
            shares[choice.unwrap_or_default()] += 1;
        }
        // A fair distribution deviates by more than 150 from 1000 once in ten million.
        assert!(shares.iter().all(|share| (850..1_150).contains(share)), "{shares:?}");
    }
}
