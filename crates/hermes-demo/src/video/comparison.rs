//! Analyses a received video: decodes it, and compares it with the sent one, frame by frame.
//!
//! In: two MPEG-TS files. Out: the number of frames that ffmpeg processed, of those it reports as corrupt, and of
//! macroblock errors. ffmpeg conceals errors, so frames that differ in any pixel from the sent ones are counted too.

use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;

use anyhow::Context;

use crate::program::Program;

/// The time limit of the decoder, which runs many times faster than the video plays.
const DECODER_TIMEOUT: Duration = Duration::from_secs(300);
/// The line after which ffmpeg's decoder reports errors; before it, ffmpeg only probes.
const DECODING: &str = "Stream mapping:";

/// The result of decoding a file.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Decoded {
    /// A hash of each frame, and its number of occurrences.
    hashes: HashMap<String, u64>,
    pub(super) complaints: Complaints,
}

/// The errors that the decoder reported.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Complaints {
    /// `corrupt decoded frame`.
    pub(super) corrupt_frames: u64,
    /// `error while decoding MB`.
    pub(super) macroblock_errors: u64,
    /// `concealing N DC` errors: macroblocks that were guessed.
    pub(super) concealed: u64,
}

impl Decoded {
    /// Decodes a file. The first packet describes all others; if it is lost in a short stream, nothing can be decoded,
    /// and the file has no frames.
    ///
    /// # Errors
    /// ffmpeg cannot be run, or does not exit.
    pub(super) async fn of(file: &Path) -> anyhow::Result<Self> {
        let (log, hashes) = (file.with_extension("decode.log"), file.with_extension("frames"));
        let (input, output) = (file.to_string_lossy(), hashes.to_string_lossy());
        let command = [
            // One thread keeps the log lines in order. `repeat` logs repeated lines, too.
            &["ffmpeg", "-nostdin", "-hide_banner", "-v", "repeat+verbose", "-y", "-threads", "1", "-i", &input],
            &["-map", "0:v:0", "-fps_mode", "passthrough", "-f", "framehash", "-hash", "murmur3", &*output][..],
        ]
        .concat();
        let mut ffmpeg = Program::start("ffmpeg", &log, &command)?;
        let ended = ffmpeg.wait(DECODER_TIMEOUT).await.context("decoding does not end")?;
        if !ended.success() {
            return Ok(Self::default());
        }
        Ok(Self {
            hashes: frames(&std::fs::read_to_string(&hashes)?),
            complaints: complaints(&std::fs::read_to_string(&log)?),
        })
    }

    /// The number of decoded frames.
    pub(super) fn frames(&self) -> u64 {
        self.hashes.values().sum()
    }

    /// Frames of this file that `other` has without a different pixel.
    pub(super) fn also_in(&self, other: &Self) -> u64 {
        let found = |(hash, count): (&String, &u64)| other.hashes.get(hash).map_or(0, |there| *there.min(count));
        self.hashes.iter().map(found).sum()
    }
}

/// Lines `stream, dts, pts, duration, size, hash`; comments begin with `#`.
fn frames(text: &str) -> HashMap<String, u64> {
    let mut hashes = HashMap::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        if let Some((_, hash)) = line.rsplit_once(',') {
            *hashes.entry(hash.trim().to_owned()).or_default() += 1;
        }
    }
    hashes
}

fn complaints(log: &str) -> Complaints {
    let mut complaints = Complaints::default();
    let decoding = log.split_once(DECODING).map_or("", |(_, after)| after);
    for line in decoding.lines() {
        if line.contains("corrupt decoded frame") {
            complaints.corrupt_frames += 1;
        } else if line.contains("error while decoding MB") {
            complaints.macroblock_errors += 1;
        } else if let Some((_, count)) = line.split_once("concealing ") {
            let count = count.split_once(" DC").and_then(|(count, _)| count.trim().parse::<u64>().ok());
            complaints.concealed += count.unwrap_or_default();
        }
    }
    complaints
}

/// Packets that ffmpeg's own RTP reader says it missed: `RTP: missed N packets`.
pub(super) fn missed_by_ffmpeg(log: &str) -> u64 {
    let numbers =
        log.lines().filter_map(|line| line.split_once("RTP: missed ")?.1.split_once(' ')?.0.parse::<u64>().ok());
    numbers.sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn complaints_are_counted_once_decoding_began() {
        let log = "[h264 @ 0x1] error while decoding MB 1 2, bytestream -5\n\
                   Stream mapping:\n\
                   [h264 @ 0x2] error while decoding MB 3 4, bytestream -5\n\
                   [h264 @ 0x2] concealing 746 DC, 745 AC, 744 MV errors in P frame\n\
                   [h264 @ 0x2] concealing 4 DC, 4 AC, 4 MV errors in B frame\n\
                   got.ts: corrupt decoded frame in stream 0\n";
        assert_eq!(complaints(log), Complaints { corrupt_frames: 1, macroblock_errors: 1, concealed: 750 });
    }

    #[test]
    fn a_frame_counts_as_often_as_it_came() {
        let text =
            |hashes: &[&str]| -> String { hashes.iter().map(|hash| format!("0, 1, 1, 1, 9, {hash}\n")).collect() };
        let decoded = |hashes: &[&str]| Decoded { hashes: frames(&text(hashes)), ..Decoded::default() };
        let sent = decoded(&["a", "b", "b", "c"]);
        let came = decoded(&["a", "b", "x"]);
        assert_eq!((sent.frames(), came.frames(), sent.also_in(&came)), (4, 3, 2));
        assert_eq!(frames("#format: frame checksums\n").len(), 0);
    }

    #[test]
    fn missed_packets_are_summed() {
        assert_eq!(missed_by_ffmpeg("[sdp @ 0x1] RTP: missed 1 packets\nx\n[sdp @ 0x1] RTP: missed 12 packets\n"), 13);
    }
}
