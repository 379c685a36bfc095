//! A real sshd with its own keys, and the configuration of a client that trusts it.
//!
//! In: a folder and an address. Out: a running server, and `ssh.conf` and `known` in the folder. Needs openssh-server.

use std::{fs, net::SocketAddr, path::Path, process::Command};

use crate::{
    Error, Result,
    netns::Namespace,
    process::{Program, Running},
};

/// The server. Dropping it ends the process.
#[derive(Debug)]
pub struct Sshd(#[allow(dead_code, reason = "its drop ends the process")] Running);

impl Sshd {
    /// True if this machine has an sshd.
    pub fn is_installed() -> bool {
        Path::new("/usr/sbin/sshd").exists()
    }

    /// Starts the server. `ssh -F FOLDER/ssh.conf` logs in as root, and accepts the host under any name.
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
        // sshd requires this directory, whatever its configuration.
        fs::create_dir_all("/run/sshd").map_err(Error::io("/run/sshd".to_owned()))?;
        let program = Program::new("sshd", "/usr/sbin/sshd", folder).within(within);
        program.args(["-D", "-e", "-f"]).args([folder.join("sshd.conf")]).start().map(Self)
    }
}
