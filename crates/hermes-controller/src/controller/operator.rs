//! Certificates of operators and of administrators of providers.
//!
//! In: requests for certificates, and names to dismiss. Out: certificates, and log entries that record which key may
//! change which documents until when. A certificate alone makes nobody an operator.
//! Never: a decision whether the caller is entitled; the API decides that.

use std::time::Duration;

use super::enrol::key_of;
use super::{ApplyError, Certificate, Controller, StateView, now};
use crate::ca::{OPERATOR_LIFE, Subject};
use crate::document::Name;
use crate::state::{Change, Operator};

/// The maximum number of valid certificates of operators, and of the administrators of each provider.
const MAX_OPERATORS: usize = 1000;

/// The caller: a key that has a certificate of this overlay.
#[derive(Clone, Copy, Debug)]
pub struct RequestKey<'a> {
    /// The digest of the key.
    pub key: &'a str,
    /// The caller's name.
    pub name: &'a Name,
    /// The caller's provider; `None` if the caller is an operator of all documents.
    pub provider: Option<&'a Name>,
}

impl Controller {
    /// Issues a certificate for an operator, or for an administrator of a provider. `asking` is the caller; `None` if
    /// this controller itself creates the operator.
    ///
    /// # Errors
    /// The request is invalid, or the store cannot be written.
    pub async fn make_operator(
        &self,
        (by, asking): (&str, Option<RequestKey<'_>>),
        request: &[u8],
        (name, provider): (&Name, Option<&Name>),
        life: Duration,
    ) -> Result<Certificate, ApplyError> {
        let (life, key) = (life.min(OPERATOR_LIFE), key_of(request)?);
        let certificate = self.sign(request, &Subject::Operator { provider, name }, life)?;
        let until = now().saturating_add(u64::try_from(life.as_millis()).unwrap_or(u64::MAX));
        let operator = Operator { key, name: name.clone(), provider: provider.cloned(), until };
        let judge = |view: &StateView| {
            view.must_ask(asking)?;
            let beside = view.operators(None).filter(|one| one.provider.as_ref() == provider);
            let is_there = view.state.operators.contains_key(&operator.key);
            if asking.is_some() && !is_there && beside.count() >= MAX_OPERATORS {
                return Err(ApplyError::Denied(format!(
                    "too many operators: {MAX_OPERATORS}; remove some with `hermes operator remove`"
                )));
            }
            Ok((vec![Change::Operator(operator.clone())], ()))
        };
        self.transact(by, judge).await?;
        Ok(certificate)
    }

    /// Renews the caller's certificate for the same key.
    ///
    /// # Errors
    /// The request is invalid or for another key, or the store cannot be written.
    pub async fn renew_operator(
        &self,
        by: &str,
        request: &[u8],
        asking: RequestKey<'_>,
        life: Duration,
    ) -> Result<Certificate, ApplyError> {
        if key_of(request)? != asking.key {
            return Err(ApplyError::Denied("the request is for another key than the client certificate's".to_owned()));
        }
        self.make_operator((by, Some(asking)), request, (asking.name, asking.provider), life).await
    }

    /// Revokes all certificates of a name. Returns their number.
    ///
    /// # Errors
    /// The name has no certificate, or is the caller's (at least one operator must remain), or the store cannot be
    /// written.
    pub async fn dismiss(
        &self,
        by: &str,
        asking: RequestKey<'_>,
        who: (&Name, Option<&Name>),
    ) -> Result<usize, ApplyError> {
        let (name, provider) = who;
        let judge = |view: &StateView| {
            view.must_ask(Some(asking))?;
            let all = view.operators(provider).filter(|one| one.provider.as_ref() == provider && one.name == *name);
            let keys: Vec<_> = all.map(|one| one.key.clone()).collect();
            if keys.is_empty() {
                let mut others = view.operators(None).filter(|one| one.name == *name);
                let next_step = match others.find_map(|one| one.provider.as_ref().filter(|_| provider.is_none())) {
                    Some(of) => format!("an operator of this name belongs to provider {of}; add --provider {of}"),
                    None => "`hermes operator list` shows all".to_owned(),
                };
                return Err(ApplyError::Unknown(format!("operator {name} not found; {next_step}")));
            }
            if keys.iter().any(|key| key == asking.key) {
                return Err(ApplyError::Denied(format!("{name} is the caller; ask another operator to remove it")));
            }
            let count = keys.len();
            Ok((keys.into_iter().map(|key| Change::Dismissed { key }).collect(), count))
        };
        Ok(self.transact(by, judge).await?.1)
    }
}

impl StateView {
    /// Checks again that the caller is an operator, because it may have been dismissed while the request waited. A
    /// dismissed operator must not create another one.
    fn must_ask(&self, asking: Option<RequestKey<'_>>) -> Result<(), ApplyError> {
        let is_one = asking.is_none_or(|asking| self.is_operator(asking.key, asking.name, asking.provider));
        is_one.then_some(()).ok_or_else(|| ApplyError::Denied("the caller is no longer an operator".to_owned()))
    }

    /// Returns the administrators of this provider; for `None`, all operators and administrators.
    pub fn operators(&self, provider: Option<&Name>) -> impl Iterator<Item = &Operator> {
        let all = self.state.operators.values().filter(|one| one.until > now());
        all.filter(move |one| provider.is_none() || one.provider.as_ref() == provider)
    }

    /// True if the key belongs to an operator.
    pub fn has_operator(&self, key: &str) -> bool {
        self.state.operators.get(key).is_some_and(|one| one.until > now())
    }

    /// True if the key belongs to this operator, whichever CA issued the certificate.
    pub fn is_operator(&self, key: &str, name: &Name, provider: Option<&Name>) -> bool {
        let made = self.state.operators.get(key);
        made.is_some_and(|made| made.name == *name && made.provider.as_ref() == provider && made.until > now())
    }
}
