//! The seal: encrypts the CA's private key for a store that others may read.
//!
//! In: a file of 32 random bytes that the controller has, and private keys. Out: keys encrypted with AES-256-GCM, each
//! bound to its certificate.
//! Never: a key sealed for another certificate, or the seal itself in the store or a backup.

use std::io::Write as _;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use aws_lc_rs::aead::{AES_256_GCM, Aad, Nonce, RandomizedNonceKey};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD as BASE64;

use super::Ca;

/// The prefix of a sealed key.
const MARK: &str = "sealed-1:";
/// The length of the seal file, in bytes.
const KEY_BYTES: usize = 32;
/// The length of a nonce, in bytes.
const NONCE_BYTES: usize = 12;

/// The reason why a key or a seal is unusable.
#[derive(Debug, thiserror::Error)]
pub enum SealError {
    /// The key in the store is sealed, and no seal is configured.
    #[error("the CA's key in the store is sealed; start the controller with --seal-file and the file that sealed it")]
    Missing,
    /// The key was sealed with another seal.
    #[error(
        "wrong --seal-file: the CA's key in the store was sealed with another file; copy that file from where the \
         controller ran before, or from another controller of this overlay"
    )]
    Other,
    /// The seal file is unusable.
    #[error("--seal-file {file}: {why}", file = file.display())]
    File {
        /// The path of the file.
        file: PathBuf,
        /// The reason.
        why: String,
    },
    /// The system has no randomness or no cipher.
    #[error("cannot seal the CA's key: no randomness or no cipher in the system")]
    Unable,
}

/// A key that encrypts the CA's private key.
pub struct Seal {
    key: RandomizedNonceKey,
}

/// Leaves the seal out of logs.
impl std::fmt::Debug for Seal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Seal")
    }
}

impl Seal {
    /// Reads a seal from a file. Returns `None` if the file does not exist.
    ///
    /// # Errors
    /// The file cannot be read, or is not a seal.
    pub fn read(file: &Path) -> Result<Option<Self>, SealError> {
        let fault = |why: String| SealError::File { file: file.to_owned(), why };
        let bytes = match std::fs::read(file) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(fault(format!("cannot be read: {error}"))),
        };
        if std::fs::metadata(file).is_ok_and(|file| file.permissions().mode() & 0o007 != 0) {
            tracing::warn!(file = %file.display(), "the seal file is readable by everyone on this machine; run chmod \
                                                    o= on it");
        }
        if bytes.len() != KEY_BYTES {
            return Err(fault(format!(
                "invalid seal: {} bytes, expected {KEY_BYTES}; name a new file to create a seal",
                bytes.len()
            )));
        }
        Self::of(&bytes).map(Some)
    }

    /// Creates a seal in a new file that only its owner may read.
    ///
    /// # Errors
    /// The file exists, or cannot be written.
    pub fn create(file: &Path) -> Result<Self, SealError> {
        let mut bytes = [0; KEY_BYTES];
        aws_lc_rs::rand::fill(&mut bytes).map_err(|_| SealError::Unable)?;
        let path = file;
        let written = || {
            let mut file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(file)?;
            file.write_all(&bytes)?;
            file.sync_all()?;
            // The directory is synced too, because the file must survive a power failure: only it can decrypt the CA's
            // key.
            let directory = path.parent().filter(|directory| !directory.as_os_str().is_empty());
            std::fs::File::open(directory.unwrap_or(Path::new(".")))?.sync_all()
        };
        written().map_err(|error: std::io::Error| SealError::File {
            file: file.to_owned(),
            why: format!("cannot be written: {error}"),
        })?;
        Self::of(&bytes)
    }

    fn of(bytes: &[u8]) -> Result<Self, SealError> {
        let key = RandomizedNonceKey::new(&AES_256_GCM, bytes).map_err(|_| SealError::Unable)?;
        Ok(Self { key })
    }
}

impl Ca {
    /// True if the private key is sealed.
    pub fn is_sealed(&self) -> bool {
        self.key.starts_with(MARK)
    }

    /// Returns the same CA with its key encrypted.
    ///
    /// # Errors
    /// The system has no randomness.
    pub fn sealed(&self, seal: &Seal) -> Result<Self, SealError> {
        if self.is_sealed() {
            return Ok(self.clone());
        }
        let mut bytes = self.key.as_bytes().to_vec();
        let aad = Aad::from(self.certificate.as_bytes());
        let nonce = seal.key.seal_in_place_append_tag(aad, &mut bytes).map_err(|_| SealError::Unable)?;
        let key = format!("{MARK}{}", BASE64.encode([&nonce.as_ref()[..], &bytes].concat()));
        Ok(Self { key, ..self.clone() })
    }

    /// The same CA with its key decrypted.
    ///
    /// # Errors
    /// The key was encrypted with another seal, or no seal is given.
    pub fn opened(&self, seal: Option<&Seal>) -> Result<Self, SealError> {
        let Some(sealed) = self.key.strip_prefix(MARK) else { return Ok(self.clone()) };
        let seal = seal.ok_or(SealError::Missing)?;
        let bytes = BASE64.decode(sealed).map_err(|_| SealError::Other)?;
        let (nonce, bytes) = bytes.split_at_checked(NONCE_BYTES).ok_or(SealError::Other)?;
        let nonce = Nonce::try_assume_unique_for_key(nonce).map_err(|_| SealError::Other)?;
        let (aad, mut bytes) = (Aad::from(self.certificate.as_bytes()), bytes.to_vec());
        let opened = seal.key.open_in_place(nonce, aad, &mut bytes).map_err(|_| SealError::Other)?;
        let key = String::from_utf8(opened.to_vec()).map_err(|_| SealError::Other)?;
        Ok(Self { key, ..self.clone() })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::os::unix::fs::PermissionsExt as _;

    use super::super::Ca;
    use super::{Seal, SealError};

    #[test]
    fn a_key_is_opened_by_its_seal_and_for_its_certificate_alone() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("seal");
        assert!(Seal::read(&file).unwrap().is_none());
        let seal = Seal::create(&file).unwrap();
        assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(Seal::create(&file).is_err(), "none is written over");
        let authority = Ca::generate(std::time::SystemTime::now()).unwrap();
        let sealed = authority.sealed(&seal).unwrap();
        assert!(sealed.is_sealed() && !sealed.key.contains(authority.key.lines().nth(1).unwrap()));
        let again = Seal::read(&file).unwrap().unwrap();
        assert!(sealed.opened(Some(&again)).unwrap() == authority);
        assert!(authority.opened(None).unwrap() == authority, "one that is not sealed needs none");
        assert!(matches!(sealed.opened(None), Err(SealError::Missing)));
        let other = Seal::create(&directory.path().join("other")).unwrap();
        assert!(matches!(sealed.opened(Some(&other)), Err(SealError::Other)));
        let swapped = Ca { certificate: authority.certificate.to_lowercase(), ..sealed.clone() };
        assert!(matches!(swapped.opened(Some(&seal)), Err(SealError::Other)));
        for cut in [11, 20, sealed.key.len() - 2] {
            let cut = Ca { key: sealed.key[..cut].to_owned(), ..sealed.clone() };
            assert!(matches!(cut.opened(Some(&seal)), Err(SealError::Other)));
        }
        std::fs::write(&file, [7; 31]).unwrap();
        assert!(Seal::read(&file).unwrap_err().to_string().contains("31 bytes"));
    }
}
