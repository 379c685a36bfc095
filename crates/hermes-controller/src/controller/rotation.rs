//! One authority follows another; and how keys of authorities are kept.
//!
//! In: a new authority, and the word of operators. Out: in the log, who is trusted and who signs, step by step.
//! Never: a step whose members are not there yet. Whoever calls has looked; here is only judged whether the step is the next one.

use std::sync::Arc;
use std::time::SystemTime;

use tokio::sync::watch;

use super::enrol::unissued;
use super::{ApplyError, Base, Controller, StateView, now};
use crate::ca::{Ca, Seal, SealError, facts};
use crate::document::Program;
use crate::state::{Change, Rotation};
use crate::store::{Revision, StoreError};
use crate::trust::Trust;

/// How a controller says that there is nothing to be ended.
const NONE: &str = "no authority follows another now; `hermes authority rotate` begins that";

impl Controller {
    /// Whom the overlay trusts, now and from now on.
    pub fn trust(&self) -> watch::Receiver<Arc<Trust>> {
        self.trust.subscribe()
    }

    /// Uses what the keys in the store are sealed with; those that are not are from now on. The first of all that needs a key.
    ///
    /// # Errors
    /// They are sealed with another one, or there is none; or the store cannot be written.
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
            // A start before may have ended between the two.
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
        // Else the log would have the key as it was.
        self.compact().await?;
        tracing::info!(
            "the authority's key is sealed; who has read the store before may have it: `hermes authority rotate`"
        );
        Ok(())
    }

    async fn compact(&self) -> Result<(), StoreError> {
        let view = self.view();
        if view.state.revision == 0 {
            return Ok(());
        }
        self.store.compact(Base { revision: view.state.revision, state: view.state.base().into() }).await
    }

    /// An authority whose key can be used.
    pub(super) fn opened(&self, authority: &Ca) -> Result<Ca, ApplyError> {
        authority.opened(self.seal.get()).map_err(sealing)
    }

    /// The same as it is kept.
    pub(super) fn sealed(&self, authority: Ca) -> Result<Ca, ApplyError> {
        match self.seal.get() {
            Some(seal) => authority.sealed(seal).map_err(sealing),
            None => Ok(authority),
        }
    }

    /// Another authority is trusted from now on, and is to sign when all trust it.
    ///
    /// # Errors
    /// It is no other one, or one follows another already; or the store cannot be written.
    pub async fn rotate(&self, by: &str, next: Ca) -> Result<Revision, ApplyError> {
        let fault = ApplyError::Unusable;
        let key = facts(&next.certificate).map_err(fault)?.key;
        let kept = self.sealed(next.clone())?;
        let judge = |view: &StateView| {
            if view.state.rotation.is_some() {
                return Err(ApplyError::NotReady(
                    "an authority follows another already; `hermes authority finish` ends that, and `hermes authority cancel` \
                     takes it back"
                        .to_owned(),
                ));
            }
            if view.state.signing().map_err(fault)?.key == key {
                return Err(ApplyError::Unusable("this authority signs already; bring another one".to_owned()));
            }
            let authority = self.opened(signing(view)?)?;
            let proof = authority.proof_of(&next, SystemTime::now()).map_err(unissued)?;
            if let Err(why) = next.is_believed_by(&proof, &authority, SystemTime::now()) {
                // Those that are connected are told whom to trust: they need no proof.
                tracing::warn!(
                    "who is away until this is finished has to enrol anew, or to be made an operator anew: what the new authority \
                     signs is believed by nobody who trusts the old one alone ({why})"
                );
            }
            let has_envoys = view.state.catalog.nodes().any(|(_, node)| node.runs == Program::Envoy);
            if has_envoys
                && next.signer().and_then(|signer| signer.revoke(std::iter::empty(), SystemTime::now())).is_err()
            {
                return Err(ApplyError::Unusable(
                    "some nodes are Envoys, which know by signed lists what is revoked: the certificate of the authority needs \
                     cRLSign among its key usages"
                        .to_owned(),
                ));
            }
            let rotation = Rotation { other: kept.clone(), is_leaving: false, proof, since: now() };
            Ok((vec![Change::Rotation(Some(rotation))], ()))
        };
        Ok(self.transact(by, judge).await?.0)
    }

    /// The newer authority signs from now on. Where it does so already, or this is not the rotation that is since `of`, nothing
    /// changes.
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

    /// The older authority is trusted no more. `of`: since when the rotation is as whoever calls has looked at it.
    ///
    /// # Errors
    /// None follows another; or the newer one signs nothing yet, unless that is to be all the same.
    pub async fn retire(&self, by: &str, of: u64, is_forced: bool) -> Result<Revision, ApplyError> {
        let judge = |view: &StateView| {
            let state = &view.state;
            let rotation = state.rotation.as_deref().ok_or_else(|| ApplyError::NotReady(NONE.to_owned()))?;
            if rotation.since != of {
                return Err(ApplyError::NotReady(
                    "somebody else has changed that meanwhile; see `hermes authority show`".to_owned(),
                ));
            }
            let gone = |authority| Change::Retired(state.retired(authority, &rotation.proof, now()));
            let changes = match rotation.is_leaving {
                true => vec![gone(&rotation.other), Change::Rotation(None)],
                false if is_forced => {
                    vec![gone(signing(view)?), Change::Ca(rotation.other.clone()), Change::Rotation(None)]
                }
                false => {
                    return Err(ApplyError::NotReady("the new authority signs nothing yet".to_owned()));
                }
            };
            Ok((changes, ()))
        };
        Ok(self.transact(by, judge).await?.0)
    }

    /// The older authority is the one that signs. What the newer one has signed is good until that is over, too.
    ///
    /// # Errors
    /// None follows another; or the store cannot be written.
    pub async fn take_back_rotation(&self, by: &str) -> Result<Revision, ApplyError> {
        let judge = |view: &StateView| {
            let rotation = view.state.rotation.as_deref().ok_or_else(|| ApplyError::NotReady(NONE.to_owned()))?;
            if !rotation.is_leaving {
                // It has signed nothing.
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
    view.state.authority.as_ref().ok_or_else(|| ApplyError::Denied("there is no authority yet".to_owned()))
}

fn sealing(error: SealError) -> ApplyError {
    ApplyError::Denied(error.to_string())
}

#[cfg(test)]
mod tests;
