//! Source files, generated here: moving pictures in which no two frames are alike.
//!
//! In: ffmpeg. Out: an MP4 with the exact length in seconds, at 30 frames a second, with a tone that lasts a second
//! longer. ffmpeg's RTP muxer never sends a last packet that is not full. Without the longer tone the last frame would
//! be truncated before it left, overlay or not.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{bail, ensure};

use crate::program::Program;

/// Frames a second, the paper's rate.
pub(super) const RATE: u64 = 30;
/// The time limit of the encoder. A minute of clip takes seconds; a machine that needs this long cannot stream either.
const ENCODER_TIMEOUT: Duration = Duration::from_secs(300);

/// A file to stream.
#[derive(Debug, Clone)]
pub(super) struct Clip {
    /// The length in seconds.
    pub(super) seconds: u64,
    /// The file name in requests.
    pub(super) name: String,
    /// The path of the file.
    pub(super) path: PathBuf,
}

impl Clip {
    /// Makes a clip in `directory`.
    ///
    /// # Errors
    /// Returns ffmpeg's error output.
    pub(super) async fn make(directory: &Path, seconds: u64) -> anyhow::Result<Self> {
        let name = format!("{seconds}s.mp4");
        let path = directory.join(&name);
        let pictures = format!("testsrc2=size=640x360:rate={RATE}:duration={seconds},noise=alls=6:allf=t");
        let tone = format!("sine=frequency=440:duration={}", seconds + 1);
        let file = path.to_string_lossy();
        // The quality is higher than that of the stream, which is encoded again.
        let command = [
            &["ffmpeg", "-nostdin", "-hide_banner", "-v", "error", "-y"][..],
            &["-f", "lavfi", "-i", &pictures, "-f", "lavfi", "-i", &tone],
            &["-c:v", "libx264", "-preset", "ultrafast", "-b:v", "3M", "-pix_fmt", "yuv420p"],
            &["-c:a", "aac", "-b:a", "24k", "-ac", "1", &file],
        ]
        .concat();
        let mut ffmpeg = Program::start("ffmpeg", &directory.join(format!("{name}.log")), &command)?;
        match ffmpeg.wait(ENCODER_TIMEOUT).await {
            Some(status) if status.success() => Ok(Self { seconds, name, path }),
            Some(_) => bail!("ffmpeg could not make a clip: {}", ffmpeg.last_lines(4).join("; ")),
            None => bail!("ffmpeg did not make a clip of {seconds} s within {ENCODER_TIMEOUT:?}"),
        }
    }
}

/// Whether ffmpeg is built with the encoder that clips are made with.
///
/// # Errors
/// The encoder is missing.
pub(super) fn can_encode() -> anyhow::Result<()> {
    let encoders = Command::new("ffmpeg").args(["-hide_banner", "-v", "error", "-encoders"]).output()?;
    let encoders = String::from_utf8_lossy(&encoders.stdout).into_owned();
    ensure!(encoders.contains("libx264"), "this ffmpeg has no libx264: install one that has (Debian's does)");
    Ok(())
}
