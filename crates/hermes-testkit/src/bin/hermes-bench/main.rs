//! The benchmark of Hermes.
use anyhow::Result;
fn main() -> Result<()> {
    let task = serde_json::from_str(&std::env::args().nth(2).unwrap_or_default())?;
    println!(
        "{}",
        serde_json::to_string(&hermes_testkit::load::run(&task)?)?
    );
    Ok(())
}
