//! A temporary PKI: an overlay's CA and certificates of its nodes, users and servers.
//!
//! In: names. Out: PEM files whose URI SANs are `spiffe://OVERLAY/node/NAME`, `.../user/NAME` and
//! `.../role/standalone`, with DNS and address SANs. Keys are P-256, new each time, and stored only in the requested
//! files. Certificates have rcgen's default validity: they are for tests only.

use std::{
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    SanType, string::Ia5String,
};

use crate::{Error, Result};

/// The CA of one overlay.
#[derive(Debug)]
pub struct Authority {
    overlay: String,
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

/// The subject of a certificate. All parts are optional, but a certificate without any SAN is rejected.
#[derive(Debug, Clone, Default)]
pub struct Subject {
    /// `spiffe://OVERLAY/node/NAME`.
    pub node: Option<String>,
    /// `spiffe://OVERLAY/user/NAME`, one for each.
    pub users: Vec<String>,
    /// `spiffe://OVERLAY/role/standalone`.
    pub standalone: bool,
    /// DNS SANs.
    pub dns: Vec<String>,
    /// Address SANs.
    pub addresses: Vec<IpAddr>,
    /// The certificate expired in 2020.
    pub is_over: bool,
}

/// A certificate and its key, in PEM.
#[derive(Debug, Clone)]
pub struct Identity {
    /// Certificate of the subject.
    pub cert_pem: String,
    /// PKCS#8 key.
    pub key_pem: String,
    /// Certificate of the CA that signed it.
    pub ca_pem: String,
}

/// The files of an [`Identity`].
#[derive(Debug, Clone)]
pub struct IdentityFiles {
    /// The file `NAME.pem`.
    pub cert: PathBuf,
    /// The file `NAME.key`.
    pub key: PathBuf,
    /// The file `ca.pem`.
    pub ca: PathBuf,
}

impl Authority {
    /// A new CA for `overlay`.
    ///
    /// # Errors
    /// The name is not valid in a certificate.
    pub fn new(overlay: &str) -> Result<Self> {
        let failed = |source| Error::Certificate { subject: format!("the CA of {overlay}"), source };
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.distinguished_name.push(DnType::CommonName, format!("{overlay} overlay CA"));
        let key = KeyPair::generate().map_err(failed)?;
        let pem = params.self_signed(&key).map_err(failed)?.pem();
        Ok(Self { overlay: overlay.to_owned(), pem, issuer: Issuer::new(params, key) })
    }

    /// The CA's certificate in PEM.
    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// A certificate for `subject`, good for both ends of TLS.
    ///
    /// # Errors
    /// A name is not valid in a certificate.
    pub fn issue(&self, subject: &Subject) -> Result<Identity> {
        let name = subject.common_name();
        let failed = |source| Error::Certificate { subject: name.clone(), source };
        let mut params = CertificateParams::default();
        params.subject_alt_names = self.names(subject).map_err(failed)?;
        params.distinguished_name.push(DnType::CommonName, &name);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        if subject.is_over {
            params.not_after = rcgen::date_time_ymd(2020, 1, 1);
        }
        let key = KeyPair::generate().map_err(failed)?;
        let cert = params.signed_by(&key, &self.issuer).map_err(failed)?;
        Ok(Identity { cert_pem: cert.pem(), key_pem: key.serialize_pem(), ca_pem: self.pem.clone() })
    }

    fn names(&self, subject: &Subject) -> std::result::Result<Vec<SanType>, rcgen::Error> {
        let uri = |kind: &str, name: &str| {
            Ok::<_, rcgen::Error>(SanType::URI(Ia5String::try_from(format!(
                "spiffe://{}/{kind}/{name}",
                self.overlay
            ))?))
        };
        let mut names = Vec::new();
        if let Some(node) = &subject.node {
            names.push(uri("node", node)?);
        }
        for user in &subject.users {
            names.push(uri("user", user)?);
        }
        if subject.standalone {
            names.push(uri("role", "standalone")?);
        }
        for dns in &subject.dns {
            names.push(SanType::DnsName(Ia5String::try_from(dns.as_str())?));
        }
        names.extend(subject.addresses.iter().copied().map(SanType::IpAddress));
        Ok(names)
    }
}

impl Subject {
    /// A node of the overlay.
    pub fn node(name: &str) -> Self {
        Self { node: Some(name.to_owned()), ..Self::default() }
    }

    /// A server outside the overlay with a DNS name.
    pub fn server(dns: &str) -> Self {
        Self { dns: vec![dns.to_owned()], ..Self::default() }
    }

    /// Binds a user to it.
    #[must_use]
    pub fn with_user(mut self, user: &str) -> Self {
        self.users.push(user.to_owned());
        self
    }

    /// Gives it the role `standalone`.
    #[must_use]
    pub fn standalone(mut self) -> Self {
        self.standalone = true;
        self
    }

    /// Adds a DNS SAN.
    #[must_use]
    pub fn with_dns(mut self, dns: &str) -> Self {
        self.dns.push(dns.to_owned());
        self
    }

    /// Adds an address SAN.
    #[must_use]
    pub fn with_address(mut self, address: IpAddr) -> Self {
        self.addresses.push(address);
        self
    }

    /// Makes the certificate an expired one.
    #[must_use]
    pub fn over(mut self) -> Self {
        self.is_over = true;
        self
    }

    fn common_name(&self) -> String {
        let first = self.node.as_ref().or(self.users.first()).or(self.dns.first());
        first.cloned().unwrap_or_else(|| "unnamed".to_owned())
    }
}

impl Identity {
    /// Writes `NAME.pem`, `NAME.key` and `ca.pem` into `dir`.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn write(&self, dir: &Path, name: &str) -> Result<IdentityFiles> {
        let files = IdentityFiles {
            cert: dir.join(format!("{name}.pem")),
            key: dir.join(format!("{name}.key")),
            ca: dir.join("ca.pem"),
        };
        let parts = [(&files.cert, &self.cert_pem), (&files.key, &self.key_pem), (&files.ca, &self.ca_pem)];
        for (path, pem) in parts {
            fs::write(path, pem).map_err(Error::io(format!("writing {}", path.display())))?;
        }
        Ok(files)
    }
}
