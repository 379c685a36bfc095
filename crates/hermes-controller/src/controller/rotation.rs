//! CA rotation, and the seal of CA keys.
//!
//! In: a new CA, and decisions of operators. Out: log entries that record which CAs are trusted and which one signs.
//! Never: a check whether all nodes are ready; the caller has done that. This file checks that the step is the next
//! one.

use std::sync::Arc;
use std::time::SystemTime;

use tokio::sync::watch;

use super::enrol::unissued;
use super::{ApplyError, BaseState, Controller, StateView, now};
use crate::ca::{Ca, Seal, SealError, facts};
use crate::document::Program;
use crate::state::{Change, Rotation};
use crate::store::{Revision, StoreError};
use crate::trust::Trust;

/// The error if no rotation is in progress.
const NONE: &str = "no CA rotation in progress; begin one with `hermes ca rotate`";

impl Controller {
    /// Watches which CAs the overlay trusts.
    pub fn trust(&self) -> watch::Receiver<Arc<Trust>> {
        self.trust.subscribe()
    }

    /// Sets the seal of the CA keys in the store, and seals those that are not sealed yet. Must be called before the
    /// first use of a key.
    ///
    /// # Errors
    /// The keys are sealed with another seal, or no seal is given; or the store cannot be written.
    pub async fn unlock(&self, seal: Option<Seal>) -> Result<(), ApplyError> {
        if let Some(seal) = seal {
            let _ = self.seal.set(seal);
        }
        let is_open = |view: &StateView| view.state.authorities().any(|authority| !authority.is_sealed());
        for authority in self.view().state.authorities() {
            self.opened(authority)?;
        }
        if self.seal.get().is_none() {
            return Ok(());
        }
        if !is_open(&self.view()) {
            // An earlier start may have sealed the keys, and ended before it compacted the log.
            return Ok(self.compact().await?);
        }
        let judge = |view: &StateView| {
            let mut changes = Vec::new();
            if let Some(authority) = &view.state.authority {
                changes.push(Change::Ca(self.sealed(authority.clone())?));
            }
            if let Some(rotation) = view.state.rotation.as_deref() {
                let other = self.sealed(rotation.other.clone())?;
                changes.push(Change::Rotation(Some(Rotation { other, ..rotation.clone() })));
            }
            Ok((changes, ()))
        };
        self.transact("controller", judge).await?;
        // Without compaction, the log would still contain the unsealed key.
        self.compact().await?;
        tracing::info!(
            "CA key sealed; an earlier reader of the store may have it, so rotate the CA: `hermes ca rotate`"
        );
        Ok(())
    }

    async fn compact(&self) -> Result<(), StoreError> {
        let view = self.view();
        if view.state.revision == 0 {
            return Ok(());
        }
        self.store.compact(BaseState { revision: view.state.revision, state: view.state.base().into() }).await
    }

    /// The CA with its key decrypted.
    pub(super) fn opened(&self, authority: &Ca) -> Result<Ca, ApplyError> {
        authority.opened(self.seal.get()).map_err(sealing)
    }

    /// The CA with its key encrypted if this controller has a seal.
    pub(super) fn sealed(&self, authority: Ca) -> Result<Ca, ApplyError> {
        match self.seal.get() {
            Some(seal) => authority.sealed(seal).map_err(sealing),
            None => Ok(authority),
        }
    }

    /// Begins a rotation: the new CA is trusted from now on, and signs once all nodes trust it.
    ///
    /// # Errors
    /// The CA is the current one, or a rotation is in progress; or the store cannot be written.
    pub async fn rotate(&self, by: &str, next: Ca) -> Result<Revision, ApplyError> {
        let fault = ApplyError::Unusable;
        let key = facts(&next.certificate).map_err(fault)?.key;
        let kept = self.sealed(next.clone())?;
        let judge = |view: &StateView| {
            if view.state.rotation.is_some() {
                return Err(ApplyError::NotReady(
                    "CA rotation in progress; end it with `hermes ca finish`, or cancel it with `hermes \
                     ca cancel`"
                        .to_owned(),
                ));
            }
            if view.state.signing().map_err(fault)?.key == key {
                return Err(ApplyError::Unusable("this CA signs already; import another one".to_owned()));
            }
            let authority = self.opened(signing(view)?)?;
            let proof = authority.proof_of(&next, SystemTime::now()).map_err(unissued)?;
            if let Err(why) = next.is_believed_by(&proof, &authority, SystemTime::now()) {
                // The rotation proceeds, because connected nodes receive the new root directly and need no
                // cross-certificate.
                tracing::warn!(
                    "peers that trust only the old CA reject the new one's certificates: nodes that stay \
                     disconnected until the rotation ends must enrol again, and operators need new files ({why})"
                );
            }
            let has_envoys = view.state.catalog.nodes().any(|(_, node)| node.runs == Program::Envoy);
            if has_envoys
                && next.signer().and_then(|signer| signer.revoke(std::iter::empty(), SystemTime::now())).is_err()
            {
                return Err(ApplyError::Unusable(
                    "the CA's certificate needs cRLSign in its key usage: some nodes are Envoys, which use \
                     revocation lists"
                        .to_owned(),
                ));
            }
            let rotation = Rotation { other: kept.clone(), is_leaving: false, proof, since: now() };
            Ok((vec![Change::Rotation(Some(rotation))], ()))
        };
        Ok(self.transact(by, judge).await?.0)
    }

    /// Makes the new CA sign. Changes nothing if it signs already, or if the rotation did not begin at `of`, in
    /// milliseconds since 1970.
    ///
    /// # Errors
    /// The store cannot be written.
    pub async fn switch(&self, by: &str, of: u64) -> Result<Revision, ApplyError> {
        let judge = |view: &StateView| {
            let next = view.state.rotation.as_deref().filter(|rotation| !rotation.is_leaving && rotation.since == of);
            let Some(Rotation { other, proof, .. }) = next else { return Ok((Vec::new(), ())) };
            let (before, proof) = (signing(view)?.clone(), proof.clone());
            let rotation = Rotation { other: before, is_leaving: true, proof, since: now() };
            Ok((vec![Change::Ca(other.clone()), Change::Rotation(Some(rotation))], ()))
        };
        Ok(self.transact(by, judge).await?.0)
    }

    /// Ends the rotation: the old CA is no longer trusted. `of` is the time at which the rotation entered the phase
    /// that the caller has read, in milliseconds since 1970.
    ///
    /// # Errors
    /// No rotation is in progress; or the new CA does not sign yet, and the caller does not force it.
    pub async fn retire(&self, by: &str, of: u64, is_forced: bool) -> Result<Revision, ApplyError> {
        let judge = |view: &StateView| {
            let state = &view.state;
            let rotation = state.rotation.as_deref().ok_or_else(|| ApplyError::NotReady(NONE.to_owned()))?;
            if rotation.since != of {
                return Err(ApplyError::NotReady(
                    "the rotation was changed in the meantime; see `hermes ca show`".to_owned(),
                ));
            }
            let gone = |authority| Change::Retired(state.retired(authority, &rotation.proof, now()));
            let changes = match rotation.is_leaving {
                true => vec![gone(&rotation.other), Change::Rotation(None)],
                false if is_forced => {
                    vec![gone(signing(view)?), Change::Ca(rotation.other.clone()), Change::Rotation(None)]
                }
                false => {
                    return Err(ApplyError::NotReady("the new CA does not sign yet".to_owned()));
                }
            };
            Ok((changes, ()))
        };
        Ok(self.transact(by, judge).await?.0)
    }

    /// Cancels the rotation: the old CA signs again. Certificates of the new CA stay valid until the rotation ends.
    ///
    /// # Errors
    /// No rotation is in progress, or the store cannot be written.
    pub async fn cancel_rotation(&self, by: &str) -> Result<Revision, ApplyError> {
        let judge = |view: &StateView| {
            let rotation = view.state.rotation.as_deref().ok_or_else(|| ApplyError::NotReady(NONE.to_owned()))?;
            if !rotation.is_leaving {
                // The new CA has not signed anything.
                return Ok((vec![Change::Rotation(None)], ()));
            }
            let (newer, older) = (signing(view)?, &rotation.other);
            let proof = self.opened(newer)?.proof_of(older, SystemTime::now()).map_err(unissued)?;
            let rotation = Rotation { other: newer.clone(), is_leaving: true, proof, since: now() };
            Ok((vec![Change::Ca(older.clone()), Change::Rotation(Some(rotation))], ()))
        };
        Ok(self.transact(by, judge).await?.0)
    }
}

fn signing(view: &StateView) -> Result<&Ca, ApplyError> {
    view.state.authority.as_ref().ok_or_else(|| ApplyError::Denied("no CA yet".to_owned()))
}

fn sealing(error: SealError) -> ApplyError {
    ApplyError::Denied(error.to_string())
}

#[cfg(test)]
mod tests;
