//! Work of a stated amount within an unchanged proxy: its workers burn time or stand still, as requests ask.
//!
//! In: a directory. Out: a library for LD_PRELOAD (`work.c`). It needs a C compiler, as the build of Hermes does. Never: a change of
//! the proxy itself.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{Error, Result};

/// Compiles the library. A request with `x-work: burn 500` then costs 500 µs of CPU time, and `x-work: block 500` stops the worker that
/// reads it for 500 µs. The field must arrive with the first bytes of a GET, over HTTP/1.1 in the clear.
///
/// # Errors
/// There is no C compiler, or the directory cannot be written.
pub fn library(dir: &Path) -> Result<PathBuf> {
    let (source, library) = (dir.join("work.c"), dir.join("work.so"));
    std::fs::write(&source, include_str!("work.c")).map_err(Error::io(format!("writing {}", source.display())))?;
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-O2", "-Wall", "-o"]).args([&library, &source]);
    let status = compiler.status().map_err(Error::io("running cc"))?;
    if status.success() {
        return Ok(library);
    }
    Err(Error::Command { command: "cc".to_owned(), output: status.to_string() })
}
