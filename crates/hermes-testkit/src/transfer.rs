//! A verified transfer.
//!
//! In: a listener client, a tunnel mode, a size. Out: success if every byte arrived unchanged; otherwise an error with its
//! position. Pieces have random lengths, so that our boundaries do not match those of the product.

use std::{collections::VecDeque, io};

use crate::{
    flow::{Flow, FlowMode, MAX_PAYLOAD},
    h3,
    listener_client::{ListenerClient, TunnelMode},
    multiplex::{self, Multiplex},
    origin::http::BYTES_SEED,
    pattern::{Digest, Pattern},
    raw_http1::RawHttp1,
    tunnel::{BoxedStream, Reader, Writer},
};
use bytes::Bytes;
use http::Request;
use rand::{Rng as _, rngs::SmallRng};

/// HTTP version of the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// HTTP/1.1.
    H1,
    /// HTTP/2.
    H2,
    /// HTTP/3.
    H3,
}

/// The longest piece of one send.
const CHUNK_SIZE: usize = 200 << 10;
/// Datagrams in flight at once: a modest rate on any machine.
const OUTSTANDING: usize = 4;
/// Bytes in flight at once: a socket with the system's default buffer (Envoy's) has no room for three of the largest
/// datagrams, and loses what it does not read in time.
const OUTSTANDING_BYTES: usize = 80 << 10;

fn wrong(what: impl Into<String>) -> io::Error {
    io::Error::other(what.into())
}

/// Sends `size` bytes through a tunnel to an echo server, and checks the echo and the end of the stream.
///
/// # Errors
/// The tunnel failed, or the echo differs; the error contains the position.
pub async fn echo(
    client: &ListenerClient,
    mode: TunnelMode,
    authority: &str,
    size: usize,
    rng: &mut SmallRng,
) -> io::Result<()> {
    let tunnel = client.tunnel(mode, authority).await?;
    let pattern = Pattern::new(rng.random());
    let lengths = chunks(size, rng);
    let sending = async {
        let mut writer = send(tunnel.writer, pattern, lengths).await?;
        writer.finish().await?;
        // Kept until all bytes are back: dropping an HTTP/2 stream would reset it.
        Ok(writer)
    };
    tokio::try_join!(sending, receive(tunnel.reader, pattern, size)).map(drop)
}

/// Works like [`echo`], for proxies that close both directions when one ends: our direction ends only after the whole
/// echo.
///
/// # Errors
/// The errors of [`echo`].
pub async fn echo_whole(
    client: &ListenerClient,
    mode: TunnelMode,
    authority: &str,
    size: usize,
    rng: &mut SmallRng,
) -> io::Result<()> {
    let mut tunnel = client.tunnel(mode, authority).await?;
    let pattern = Pattern::new(rng.random());
    let lengths = chunks(size, rng);
    let sending = send(tunnel.writer, pattern, lengths);
    let receiving = async {
        let mut offset = 0;
        while offset < size {
            let chunk =
                tunnel.reader.chunk().await?.ok_or_else(|| wrong(format!("{offset} of {size} bytes came back")))?;
            check(pattern, offset, &chunk, size)?;
            offset += chunk.len();
        }
        Ok(())
    };
    let (mut writer, ()) = tokio::try_join!(sending, receiving)?;
    writer.finish().await
}

fn check(pattern: Pattern, offset: usize, chunk: &[u8], size: usize) -> io::Result<()> {
    match pattern.mismatch(offset as u64, chunk) {
        Some(at) => Err(wrong(format!("byte {at} of {size} came back changed"))),
        None if offset + chunk.len() > size => Err(wrong(format!("more than {size} bytes came back"))),
        None => Ok(()),
    }
}

fn chunks(size: usize, rng: &mut SmallRng) -> Vec<usize> {
    let mut lengths = Vec::new();
    let mut left = size;
    while left > 0 {
        let length = rng.random_range(1..=CHUNK_SIZE).min(left);
        lengths.push(length);
        left -= length;
    }
    lengths
}

async fn send(mut writer: Writer, pattern: Pattern, lengths: Vec<usize>) -> io::Result<Writer> {
    let mut offset = 0;
    for length in lengths {
        writer.send(chunk(pattern, offset, length)).await?;
        offset += length;
    }
    Ok(writer)
}

fn chunk(pattern: Pattern, offset: usize, length: usize) -> Bytes {
    let mut chunk = vec![0; length];
    pattern.fill(offset as u64, &mut chunk);
    Bytes::from(chunk)
}

async fn receive(mut reader: Reader, pattern: Pattern, size: usize) -> io::Result<Reader> {
    let mut offset = 0;
    while let Some(chunk) = reader.chunk().await? {
        check(pattern, offset, &chunk, size)?;
        offset += chunk.len();
    }
    if offset == size { Ok(reader) } else { Err(wrong(format!("{offset} of {size} bytes came back"))) }
}

/// Uploads `size` bytes and compares the origin's digest of them.
///
/// # Errors
/// The exchange failed, or the bytes differ; the error contains the position.
pub async fn upload(
    client: &ListenerClient,
    version: Version,
    authority: &str,
    size: usize,
    rng: &mut SmallRng,
) -> io::Result<()> {
    let pattern = Pattern::new(rng.random());
    let lengths = chunks(size, rng);
    let answer = match version {
        Version::H1 => upload_h1(client.h1().await?, authority, pattern, &lengths, rng.random()).await?,
        Version::H2 => upload_h2(client.h2().await?, authority, pattern, &lengths).await?,
        Version::H3 => upload_h3(&client.h3().await?, authority, pattern, &lengths, rng.random()).await?,
    };
    let mut digest = Digest::default();
    let mut offset = 0;
    for length in lengths {
        digest.update(&chunk(pattern, offset, length));
        offset += length;
    }
    let wanted = serde_json::json!({"bytes": size, "digest": digest.hex()});
    let got: serde_json::Value = serde_json::from_str(&answer).map_err(|_| wrong(format!("answer {answer:?}")))?;
    if got == wanted { Ok(()) } else { Err(wrong(format!("the origin got {got}, sent was {wanted}"))) }
}

async fn upload_h1(
    mut http1: RawHttp1<BoxedStream>,
    authority: &str,
    pattern: Pattern,
    lengths: &[usize],
    chunked: bool,
) -> io::Result<String> {
    let size: usize = lengths.iter().sum();
    let framing = if chunked { "transfer-encoding: chunked".to_owned() } else { format!("content-length: {size}") };
    http1.send(format!("POST /upload HTTP/1.1\r\nhost: {authority}\r\n{framing}\r\n\r\n")).await?;
    let mut offset = 0;
    for length in lengths {
        let chunk = chunk(pattern, offset, *length);
        if chunked {
            http1.send_chunk(&chunk).await?
        } else {
            http1.send(&chunk).await?
        }
        offset += length;
    }
    if chunked {
        http1.send("0\r\n\r\n").await?;
    }
    let head = http1.head().await?;
    http1.body(&head).await.map(|content| content.text())
}

async fn upload_h2(
    mut connection: Multiplex,
    authority: &str,
    pattern: Pattern,
    lengths: &[usize],
) -> io::Result<String> {
    let request = Request::post(format!("http://{authority}/upload")).body(()).map_err(io::Error::other)?;
    let (response, mut stream) = connection.open(request, lengths.is_empty()).await?;
    let sending = async {
        let mut offset = 0;
        for (index, length) in lengths.iter().enumerate() {
            let ends = index + 1 == lengths.len();
            multiplex::send_all(&mut stream, chunk(pattern, offset, *length), ends).await?;
            offset += length;
        }
        Ok(())
    };
    let (answer, ()) = tokio::try_join!(multiplex::answer(response), sending)?;
    Ok(answer.text())
}

async fn upload_h3(
    connection: &h3::Connection,
    authority: &str,
    pattern: Pattern,
    lengths: &[usize],
    says_length: bool,
) -> io::Result<String> {
    let request = Request::post(format!("https://{authority}/upload"));
    let size: usize = lengths.iter().sum();
    let request = if says_length { request.header("content-length", size) } else { request };
    let (mut send, mut recv) = connection.request(&request.body(()).map_err(io::Error::other)?, false).await?;
    let sending = async {
        let mut offset = 0;
        for length in lengths {
            send.data(chunk(pattern, offset, *length)).await?;
            offset += length;
        }
        send.finish()
    };
    let (answer, ()) = tokio::try_join!(recv.answer(), sending)?;
    Ok(answer.text())
}

/// Downloads `size` bytes of a known pattern.
///
/// # Errors
/// The exchange failed, or the bytes differ; the error contains the position.
pub async fn download(client: &ListenerClient, version: Version, authority: &str, size: usize) -> io::Result<()> {
    let data = match version {
        Version::H1 => {
            let mut http1 = client.h1().await?;
            http1.send(format!("GET /bytes/{size} HTTP/1.1\r\nhost: {authority}\r\n\r\n")).await?;
            let head = http1.head().await?;
            http1.body(&head).await?.data
        }
        Version::H2 => {
            let mut connection = client.h2().await?;
            connection.get(&format!("http://{authority}/bytes/{size}")).await?.data
        }
        Version::H3 => client.h3().await?.get(&format!("https://{authority}/bytes/{size}")).await?.data,
    };
    match Pattern::new(BYTES_SEED).mismatch(0, &data) {
        _ if data.len() != size => Err(wrong(format!("{} of {size} bytes came", data.len()))),
        Some(at) => Err(wrong(format!("byte {at} of {size} is wrong"))),
        None => Ok(()),
    }
}

/// Sends datagrams of random length, including 0 and the maximum, and expects each back exactly once and unchanged.
///
/// # Errors
/// The exchange failed, or the bytes differ; the error contains the position.
pub async fn datagrams(
    client: &ListenerClient,
    mode: FlowMode,
    name: &str,
    count: usize,
    rng: &mut SmallRng,
) -> io::Result<()> {
    datagrams_between((0, MAX_PAYLOAD), client, mode, name, count, rng).await
}

/// Works like [`datagrams`], with lengths between two limits, for proxies that do not carry all lengths.
///
/// # Errors
/// The errors of [`datagrams`].
pub async fn datagrams_between(
    (least, most): (usize, usize),
    client: &ListenerClient,
    mode: FlowMode,
    name: &str,
    count: usize,
    rng: &mut SmallRng,
) -> io::Result<()> {
    let mut flow = Flow::open(client, mode, name, 7).await?;
    let seed: u64 = rng.random();
    let mut outstanding: VecDeque<Vec<u8>> = VecDeque::new();
    for number in 0..count {
        let length = match number % 10 {
            0 => least,
            1 => most,
            2..6 => rng.random_range(least..=most.min(1500)),
            _ => rng.random_range(least..=most),
        };
        let payload = numbered(seed, number, length);
        let waiting = |outstanding: &VecDeque<Vec<u8>>| outstanding.iter().map(Vec::len).sum::<usize>();
        while !outstanding.is_empty() && waiting(&outstanding) + length > OUTSTANDING_BYTES {
            take_back(&mut flow, &mut outstanding).await?;
        }
        flow.send(&payload).await?;
        outstanding.push_back(payload);
        if outstanding.len() == OUTSTANDING {
            take_back(&mut flow, &mut outstanding).await?;
        }
    }
    while !outstanding.is_empty() {
        take_back(&mut flow, &mut outstanding).await?;
    }
    Ok(())
}

/// A payload that is unique in the run, as far as its length allows: its number, then random bytes.
fn numbered(seed: u64, number: usize, length: usize) -> Vec<u8> {
    let mut payload = Pattern::new(seed.wrapping_add(number as u64)).bytes(length);
    let digits = (number as u32).to_be_bytes();
    let room = payload.len().min(digits.len());
    payload[..room].copy_from_slice(&digits[digits.len() - room..]);
    payload
}

async fn take_back(flow: &mut Flow, outstanding: &mut VecDeque<Vec<u8>>) -> io::Result<()> {
    let lengths: Vec<usize> = outstanding.iter().map(Vec::len).collect();
    let got = flow.receive().await.map_err(|error| wrong(format!("waiting for one of {lengths:?} bytes: {error}")))?;
    match outstanding.iter().position(|sent| *sent == got) {
        Some(place) => {
            outstanding.remove(place);
            Ok(())
        }
        None => Err(wrong(format!("{} bytes came back that were not sent; outstanding: {lengths:?}", got.len()))),
    }
}
