//! Benchmark of capsules with 1,200-byte datagrams.
//!
//! Out: nanoseconds per datagram for encoding, for decoding a read of 64 capsules, for decoding the same stream in
//! pieces that cut capsules (so that some are copied), and for skipping. Never touches a socket.

use std::hint::black_box;

use bytes::{Bytes, BytesMut};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use hermes_wire::capsule::{self, Capsule, CapsuleDecoder};

const PAYLOAD: [u8; 1_200] = [0x5a; 1_200];

/// Datagrams in one read: about the number in 64 KiB or a GRO batch.
const BATCH: usize = 64;

fn stream() -> Bytes {
    let mut out = BytesMut::new();
    for _ in 0..BATCH {
        capsule::put_datagram(&mut out, &PAYLOAD);
    }
    out.freeze()
}

/// Decodes all of `pieces`; returns the number of UDP payloads.
fn drain(decoder: &mut CapsuleDecoder, pieces: &[Bytes]) -> usize {
    let mut payloads = 0;
    for piece in pieces {
        decoder.push(piece.clone());
        while let Ok(Some(capsule)) = decoder.next() {
            if let Capsule::Datagram(datagram) = capsule
                && let Ok(Some(payload)) = capsule::udp_payload(datagram)
            {
                payloads += usize::from(!black_box(payload).is_empty());
            }
        }
    }
    payloads
}

fn pieces(mut stream: Bytes, size: usize) -> Vec<Bytes> {
    let mut pieces = Vec::new();
    while !stream.is_empty() {
        pieces.push(stream.split_to(size.min(stream.len())));
    }
    pieces
}

fn capsules(c: &mut Criterion) {
    let mut group = c.benchmark_group("capsule");
    group.throughput(Throughput::Elements(BATCH as u64));
    group.bench_function("encode 64 x 1200", |b| {
        let mut out = BytesMut::with_capacity(BATCH * (PAYLOAD.len() + capsule::MAX_DATAGRAM_OVERHEAD));
        b.iter(|| {
            out.clear();
            for _ in 0..BATCH {
                capsule::put_datagram(&mut out, black_box(&PAYLOAD));
            }
            black_box(&out);
        });
    });
    for (name, size) in [
        ("decode 64 x 1200, one piece", usize::MAX),
        ("decode 64 x 1200, pieces of 16384", 16_384),
        ("decode 64 x 1200, pieces of 1000", 1_000),
    ] {
        let pieces = pieces(stream(), size);
        let mut decoder = CapsuleDecoder::new(capsule::MAX_HTTP_DATAGRAM);
        assert_eq!(drain(&mut decoder, &pieces), BATCH);
        group.bench_function(name, |b| b.iter(|| drain(&mut decoder, black_box(&pieces))));
    }
    let empty = [Bytes::from([0, 1, 0].repeat(BATCH))];
    group.bench_function("decode 64 empty datagrams", |b| {
        let mut decoder = CapsuleDecoder::new(capsule::MAX_HTTP_DATAGRAM);
        b.iter(|| drain(&mut decoder, black_box(&empty)));
    });
    group.finish();
}

criterion_group!(benches, capsules);
criterion_main!(benches);
