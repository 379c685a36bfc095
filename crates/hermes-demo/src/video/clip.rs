//! Source files, made here: moving pictures of which no two frames are alike.
//!
//! In: ffmpeg. Out: an MP4 of exactly so many seconds at 30 frames a second, with a tone that lasts a
//! second longer: ffmpeg's RTP muxer never sends the last packet that it did not fill, and without
//! that tone the last frame would be cut short before it left, overlay or not.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{bail, ensure};

use crate::program::Program;

/// Frames a second; the paper's read rate.
pub(super) const RATE: u64 = 30;
/// Making a minute of clip takes seconds; a machine that needs this long cannot stream either.
const PATIENCE: Duration = Duration::from_secs(300);

/// A file to stream.
#[derive(Debug, Clone)]
pub(super) struct Clip {
    /// How long it is.
    pub(super) seconds: u64,
    /// What it is asked for as.
    pub(super) name: String,
    /// Where it lies.
    pub(super) path: PathBuf,
}

impl Clip {
    /// Makes a clip in `directory`.
    ///
    /// # Errors
    /// What ffmpeg said.
    pub(super) async fn make(directory: &Path, seconds: u64) -> anyhow::Result<Self> {
        let name = format!("{seconds}s.mp4");
        let path = directory.join(&name);
        let pictures = format!("testsrc2=size=640x360:rate={RATE}:duration={seconds},noise=alls=6:allf=t");
        let tone = format!("sine=frequency=440:duration={}", seconds + 1);
        let file = path.to_string_lossy();
        // Better than what is streamed of it: that is encoded anew.
        let command = [
            &["ffmpeg", "-nostdin", "-hide_banner", "-v", "error", "-y"][..],
            &["-f", "lavfi", "-i", &pictures, "-f", "lavfi", "-i", &tone],
            &["-c:v", "libx264", "-preset", "ultrafast", "-b:v", "3M", "-pix_fmt", "yuv420p"],
            &["-c:a", "aac", "-b:a", "24k", "-ac", "1", &file],
        ]
        .concat();
        let mut ffmpeg = Program::start("ffmpeg", &directory.join(format!("{name}.log")), &command)?;
        match ffmpeg.wait(PATIENCE).await {
            Some(status) if status.success() => Ok(Self { seconds, name, path }),
            Some(_) => bail!("ffmpeg could not make a clip: {}", ffmpeg.last_lines(4).join("; ")),
            None => bail!("ffmpeg did not make a clip of {seconds} s within {PATIENCE:?}"),
        }
    }
}

/// Whether ffmpeg is built with the encoder that clips are made with.
///
/// # Errors
/// It is not.
pub(super) fn can_encode() -> anyhow::Result<()> {
    let encoders = Command::new("ffmpeg").args(["-hide_banner", "-v", "error", "-encoders"]).output()?;
    let encoders = String::from_utf8_lossy(&encoders.stdout).into_owned();
    ensure!(encoders.contains("libx264"), "this ffmpeg has no libx264: install one that has (Debian's does)");
    Ok(())
}
