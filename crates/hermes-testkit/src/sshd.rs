//! A real sshd with keys of its own, and the configuration of a client that knows it.
//!
//! In: a folder and an address. Out: a running server, and `ssh.conf` and `known` in the folder. Needs openssh-server.

use std::{fs, net::SocketAddr, path::Path, process::Command};

use crate::{
    Error, Result,
    netns::Namespace,
    process::{Program, Running},
};

/// The server; it ends when this is dropped.
#[derive(Debug)]
pub struct Sshd(#[allow(dead_code, reason = "its drop ends the process")] Running);

impl Sshd {
    /// Whether this machine has one.
    pub fn is_installed() -> bool {
        Path::new("/usr/sbin/sshd").exists()
    }

    /// Starts it. Whoever uses `ssh -F FOLDER/ssh.conf` may log in as root, and knows the host under any name.
    ///
    /// # Errors
    /// A file cannot be written, or a program cannot be started.
    pub fn start(folder: &Path, listen: SocketAddr, within: Option<&Namespace>) -> Result<Self> {
        for name in ["host", "user"] {
            let mut keygen = Command::new("ssh-keygen");
            let made = keygen.args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(folder.join(name)).status();
            let made = made.map_err(Error::io("ssh-keygen".to_owned()))?;
            if !made.success() {
                return Err(Error::io("ssh-keygen".to_owned())(std::io::ErrorKind::Other.into()));
            }
        }
        let write = |name: &str, text: &str| fs::write(folder.join(name), text).map_err(Error::io(name.to_owned()));
        let key = |name: &str| fs::read_to_string(folder.join(name)).map_err(Error::io(name.to_owned()));
        write("authorized", &key("user.pub")?)?;
        write("known", &format!("* {}", key("host.pub")?))?;
        let (at, address, port) = (folder.display(), listen.ip(), listen.port());
        let server = format!(
            "Port {port}\nListenAddress {address}\nHostKey {at}/host\nAuthorizedKeysFile {at}/authorized\n\
             StrictModes no\nPidFile none\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin prohibit-password\n"
        );
        write("sshd.conf", &server)?;
        let client =
            format!("Host *\n  IdentityFile {at}/user\n  IdentitiesOnly yes\n  UserKnownHostsFile {at}/known\n");
        write("ssh.conf", &client)?;
        // It wants this directory, whatever it is told.
        fs::create_dir_all("/run/sshd").map_err(Error::io("/run/sshd".to_owned()))?;
        let program = Program::new("sshd", "/usr/sbin/sshd", folder).within(within);
        program.args(["-D", "-e", "-f"]).args([folder.join("sshd.conf")]).start().map(Self)
    }
}
