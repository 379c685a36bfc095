//! The demo.
pub(crate) fn run(_keep: bool) -> anyhow::Result<std::process::ExitCode> {
    anyhow::bail!("not yet")
}
