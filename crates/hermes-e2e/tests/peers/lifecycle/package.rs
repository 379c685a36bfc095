//! The Debian package holds what its documents promise, its units start this program, and the image fits the manifests.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use hermes_testkit::binary;
use hermes_testkit::skip::skip;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap()
}

fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    output
}

fn printed(command: &mut Command) -> String {
    String::from_utf8(run(command).stdout).unwrap()
}

/// The commands below one, as its help lists them, each with the words before it.
fn commands(words: &[String]) -> Vec<Vec<String>> {
    let help = printed(Command::new(binary::hermes()).args(words).arg("--help"));
    let list = help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    let names = list.filter_map(|line| line.strip_prefix("  ").filter(|line| !line.starts_with(' ')));
    let names = names.filter_map(|line| line.split(' ').next()).filter(|name| *name != "help");
    let mut found = Vec::new();
    for name in names {
        let command = [words, &[name.to_owned()]].concat();
        found.extend(commands(&command));
        found.push(command);
    }
    found
}

/// A package of this program, unpacked.
fn unpacked(room: &Path) -> Option<PathBuf> {
    if Command::new("dpkg-deb").arg("--version").output().is_err() {
        skip("the Debian package", "dpkg-deb is not installed");
        return None;
    }
    let program = room.join("hermes");
    run(Command::new("objcopy").args(["--strip-all", binary::hermes()]).arg(&program));
    let script = root().join("scripts/package.sh");
    run(Command::new(script).args([&program, &room.join("dist")]).env("COMPRESSION", "none"));
    let mut files = std::fs::read_dir(room.join("dist")).unwrap().map(|entry| entry.unwrap().path());
    let package = files.find(|path| path.extension().is_some_and(|end| end == "deb")).unwrap();
    let name = package.file_name().unwrap().to_str().unwrap();
    assert!(name.starts_with(concat!("hermes_", env!("CARGO_PKG_VERSION"), "-1_")), "{name}");
    let tree = room.join("tree");
    run(Command::new("dpkg-deb").arg("--raw-extract").args([&package, &tree]));
    Some(tree)
}

/// The files below a directory, as paths from the tree's root.
fn files(tree: &Path, directory: &Path, found: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let entry = entry.unwrap();
        match entry.file_type().unwrap().is_dir() {
            true => files(tree, &entry.path(), found),
            false => _ = found.insert(entry.path().strip_prefix(tree).unwrap().to_str().unwrap().to_owned()),
        }
    }
}

#[test]
fn the_package_has_the_program_its_units_pages_and_completions() {
    let room = tempfile::tempdir().unwrap();
    let Some(tree) = unpacked(room.path()) else { return };
    let all = commands(&[]);
    assert!(all.contains(&vec!["proxy".to_owned()]) && all.contains(&vec!["node".to_owned(), "list".to_owned()]));
    let pages = all.iter().map(|words| format!("usr/share/man/man1/hermes-{}.1.gz", words.join("-")));
    let others = [
        "DEBIAN/conffiles",
        "DEBIAN/control",
        "DEBIAN/md5sums",
        "DEBIAN/postinst",
        "DEBIAN/postrm",
        "DEBIAN/prerm",
        "etc/hermes/node.yaml",
        "usr/bin/hermes",
        "usr/lib/systemd/system/hermes-controller.service",
        "usr/lib/systemd/system/hermes.service",
        "usr/lib/sysusers.d/hermes.conf",
        "usr/share/bash-completion/completions/hermes",
        "usr/share/doc/hermes/changelog.Debian.gz",
        "usr/share/doc/hermes/changelog.gz",
        "usr/share/doc/hermes/copyright",
        "usr/share/doc/hermes/third-party.txt",
        "usr/share/fish/vendor_completions.d/hermes.fish",
        "usr/share/man/man1/hermes.1.gz",
        "usr/share/zsh/vendor-completions/_hermes",
    ];
    let wanted: BTreeSet<_> = pages.chain(others.map(str::to_owned)).collect();
    let mut found = BTreeSet::new();
    files(&tree, &tree, &mut found);
    assert_eq!(found, wanted);

    let read = |path: &str| std::fs::read_to_string(tree.join(path)).unwrap();
    let third_party = read("usr/share/doc/hermes/third-party.txt");
    assert!(third_party.contains("\nrustls v") && !third_party.contains("hermes"), "{third_party}");
    assert!(third_party.lines().all(|line| line.split(' ').count() > 2), "each has a license: {third_party}");
    run(Command::new(binary::hermes()).arg("check").arg(tree.join("etc/hermes/node.yaml")));
    for script in ["postinst", "prerm", "postrm"] {
        run(Command::new("sh").arg("-n").arg(tree.join("DEBIAN").join(script)));
    }
    let completed = format!(
        "source {}; COMP_WORDS=(hermes co); COMP_CWORD=1; _hermes hermes co hermes; echo ${{COMPREPLY[@]}}",
        tree.join("usr/share/bash-completion/completions/hermes").display()
    );
    assert_eq!(printed(Command::new("bash").args(["-c", &completed])).trim(), "controller connect completions");
    let users = read("usr/lib/sysusers.d/hermes.conf");
    for (unit, parts) in [("hermes", "node"), ("hermes-controller", "controller")] {
        let path = format!("usr/lib/systemd/system/{unit}.service");
        check_unit(&room.path().join(format!("{unit}.service")), &read(&path));
        assert!(read(&path).contains(&format!("\nUser={unit}\n")), "{unit}");
        assert!(users.contains(&format!("\nu {unit} - \"Hermes {parts}\"")), "{users}");
    }
}

/// What the unit starts is a command line of this program, and systemd accepts the unit.
fn check_unit(path: &Path, unit: &str) {
    assert!(!unit.contains("Install: "), "it is installed already: {unit}");
    let command = unit.lines().find_map(|line| line.strip_prefix("ExecStart=/usr/bin/hermes ")).unwrap();
    let words = command.split(' ').map(|word| word.replace("%S", "/var/lib").replace("%t", "/run"));
    run(Command::new(binary::hermes()).args(words).arg("--help"));
    let here = unit.replace("ExecStart=/usr/bin/hermes ", &format!("ExecStart={} ", binary::hermes()));
    std::fs::write(path, here).unwrap();
    let verify = ["verify", "--man=no", "--recursive-errors=no"];
    match Command::new("systemd-analyze").args(verify).arg(path).output() {
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success() && text.trim().is_empty(), "{text}");
        }
        Err(_) => skip("the units of the package", "systemd-analyze is not installed"),
    }
}

#[test]
fn each_command_has_a_manual_page() {
    let room = tempfile::tempdir().unwrap();
    run(Command::new(binary::hermes()).args(["man", "--all"]).arg(room.path()));
    let mut all = commands(&[]);
    all.push(Vec::new());
    for words in &all {
        let name = [&["hermes".to_owned()], &words[..]].concat().join("-");
        let page = printed(Command::new(binary::hermes()).arg("man").args(words));
        assert!(page.contains(&format!(".TH {name} 1 ")) && page.contains(".SH SYNOPSIS"), "{name}: {page}");
        assert_eq!(std::fs::read_to_string(room.path().join(format!("{name}.1"))).unwrap(), page, "{name}");
    }
    assert_eq!(std::fs::read_dir(room.path()).unwrap().count(), all.len());
    // As a reader sees it.
    let mut command = Command::new("man");
    let rendered = command.args(["--warnings", "-l"]).arg(room.path().join("hermes.1")).env("MANWIDTH", "100").output();
    match rendered {
        Ok(output) => {
            let (text, warnings) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
            assert!(output.status.success() && warnings.is_empty(), "{warnings}");
            assert!(text.contains("/etc/hermes/node.yaml") && text.contains("hermes-proxy(1)"), "{text}");
        }
        Err(_) => skip("each_command_has_a_manual_page", "man is not installed"),
    }
    let output = Command::new(binary::hermes()).args(["man", "node", "nonsense"]).output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(1) && text.contains("unknown command \"nonsense\""), "{text}");
}

#[test]
fn the_image_fits_the_manifests() {
    let file = std::fs::read_to_string(root().join("Containerfile")).unwrap();
    let manifests = printed(Command::new(binary::hermes()).args(["install", "--print", "kubernetes", "controller"]));
    let value = |key: &str| {
        let line = manifests.lines().find_map(|line| line.trim_start_matches(['-', ' ']).strip_prefix(key));
        line.unwrap_or_else(|| panic!("{key} {manifests}")).trim().trim_matches('"').to_owned()
    };
    let (user, image) = (value("runAsUser:"), value("image:"));
    assert!(file.contains(&format!("\nUSER {user}:{user}\n")) && file.contains(&format!("-o {user} -g {user} /image")));
    assert_eq!(image, concat!("hermes:", env!("CARGO_PKG_VERSION")), "the name that `make image` gives");
    assert!(manifests.contains("- /usr/local/bin/hermes\n") && manifests.contains("/var/lib/hermes\n"), "{manifests}");
    for line in
        ["ENTRYPOINT [\"/usr/local/bin/hermes\"]", "VOLUME /var/lib/hermes", "STOPSIGNAL SIGTERM", "FROM scratch"]
    {
        assert!(file.lines().any(|other| other == line), "{line}");
    }
    // A DaemonSet gives its directory to that user before it starts.
    let source = std::fs::read_to_string(root().join("crates/hermes/src/kubernetes.rs")).unwrap();
    assert!(source.contains("\"command\": [\"chown\"") && file.contains("cp /bin/chown /image/usr/bin/"));
}
