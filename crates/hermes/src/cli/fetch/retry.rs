//! The retry loop: request, pause, and retry until the object is complete and verified.
//!
//! In: a URL, a client, a sink. Out: the result. The loop ends by itself only if no retry can help. Its caller enforces
//! the deadline, and may end it between any two bytes.

use std::time::{Duration, SystemTime};

use anyhow::{Context as _, bail};
use http::{HeaderMap, HeaderName, Uri};
use rand::Rng as _;
use tokio::time::Instant;

use super::client::{AttemptError, Chunk, Client, Exchange};
use super::digest::{self, Algorithm, Digests, Hashes};
use super::download::{Download, End, Meaning, RangeRequest, Take, Verdict};
use super::report::{Event, Report};
use super::response::ResponseHead;
use super::sink::Sink;
use super::{backoff, redirect};

/// Maximum number of consecutive redirects; more is a loop (browsers allow twenty, curl thirty).
const MAX_REDIRECTS: usize = 10;
/// Maximum pause between two attempts, unless the origin asks for a longer one.
const MAX_PAUSE: Duration = Duration::from_secs(30);
/// The message for content that does not match its digest.
const MISMATCH: &str = "the content does not match its digest";

/// The state of one fetch.
pub(super) struct RetryLoop<'a> {
    pub(super) url: Uri,
    pub(super) client: &'a Client,
    pub(super) download: &'a mut Download,
    pub(super) sink: &'a mut Sink,
    pub(super) report: &'a Report,
    pub(super) deadline: Instant,
}

/// The outcome of an attempt without a permanent error.
enum AttemptOutcome {
    /// The object is complete.
    Whole,
    /// A range arrived as expected; more follows.
    More,
    /// Request again, without the data held.
    Anew(&'static str),
    /// Retry later.
    Later { why: String, after: Option<Duration> },
}

impl RetryLoop<'_> {
    /// Downloads the object, and returns its verified digests.
    ///
    /// # Errors
    /// A permanent failure, with the next step.
    pub(super) async fn get(&mut self) -> anyhow::Result<Digests> {
        let mut fruitless = 0;
        loop {
            let held = self.download.held();
            let tried = self.attempt().await?;
            match tried {
                AttemptOutcome::Whole => {
                    if let Some(found) = self.verify().await? {
                        return Ok(found);
                    }
                    continue;
                }
                AttemptOutcome::More => {}
                AttemptOutcome::Anew(why) => {
                    self.report.event(&Event::Anew { why });
                    self.sink.restart()?;
                    // The first fruitless attempt is repeated at once. An origin that answers so each time gets a
                    // pause.
                    if fruitless == 0 {
                        fruitless = 1;
                        continue;
                    }
                    self.rest(fruitless, None, why).await;
                    fruitless += 1;
                    continue;
                }
                AttemptOutcome::Later { why, after } => {
                    self.sink.settle(self.download.known())?;
                    fruitless = if self.download.held() > held { 0 } else { fruitless + 1 };
                    self.rest(fruitless, after, &why).await;
                    continue;
                }
            }
            fruitless = 0;
        }
    }

    async fn rest(&self, fruitless: u32, after: Option<Duration>, why: &str) {
        let left = self.deadline.saturating_duration_since(Instant::now());
        let pause = backoff::pause(fruitless, after, left, MAX_PAUSE, rand::rng().random());
        self.report.event(&Event::Waits { why, pause });
        tokio::time::sleep(pause).await;
    }

    /// Sends one request, follows redirects and handles the response.
    async fn attempt(&mut self) -> anyhow::Result<AttemptOutcome> {
        let range = self.download.range_request();
        let from = match &range {
            RangeRequest::Whole => 0,
            RangeRequest::From(first, _) => *first,
        };
        self.report.event(&Event::Asks { from });
        let mut url = self.url.clone();
        for _ in 0..=MAX_REDIRECTS {
            let is_named = redirect::same_origin(&self.url, &url);
            let mut exchange = match self.client.send(&url, &range, is_named).await {
                Ok(exchange) => exchange,
                Err(trouble) => return self.later(trouble),
            };
            let answer = ResponseHead::read(&exchange.head, SystemTime::now());
            return Ok(match self.download.read(&range, &answer) {
                Meaning::Elsewhere(location) => {
                    url = redirect::resolve(&url, &location)?;
                    continue;
                }
                Meaning::Content(take) => self.take(&mut exchange, answer.status, &take).await?,
                Meaning::Whole => AttemptOutcome::Whole,
                Meaning::Later { why, after } => AttemptOutcome::Later { why, after },
                Meaning::Anew(why) => AttemptOutcome::Anew(why),
                Meaning::Never { why, remedy } => bail!("{why}; {remedy}"),
            });
        }
        bail!("redirected more than {MAX_REDIRECTS} times; fetch the final URL directly");
    }

    fn later(&mut self, trouble: AttemptError) -> anyhow::Result<AttemptOutcome> {
        match trouble {
            AttemptError::Passing { why, after } => Ok(AttemptOutcome::Later { why, after }),
            AttemptError::Lasting { why, remedy } => bail!("{why}; {remedy}"),
        }
    }

    /// Stores a response's content.
    async fn take(&mut self, exchange: &mut Exchange, status: u16, take: &Take) -> anyhow::Result<AttemptOutcome> {
        if let Some(why) = take.anew {
            self.report.event(&Event::Anew { why });
        }
        if self.download.held() == 0 {
            self.sink.restart()?;
        }
        self.sink.remember(self.download.known())?;
        self.counts();
        self.report.event(&Event::Answers { status });
        let mut content = Content::new(&exchange.head.headers);
        let mut skipping = Skipping::new(take, status);
        loop {
            let piece = match exchange.next().await {
                Ok(piece) => piece,
                Err(trouble) => {
                    self.download.broke();
                    return self.later(trouble);
                }
            };
            match piece {
                Some(Chunk::Data(data)) => {
                    content.hashes.update(&data);
                    if !skipping.counts(data.len()) {
                        self.download.broke();
                        let why = "more bytes than announced".to_owned();
                        return Ok(AttemptOutcome::Later { why, after: None });
                    }
                    let new = skipping.pass(&data);
                    if skipping.is_over() && skipping.prefix.is_some() {
                        self.compare(skipping.prefix.take()).await?;
                    }
                    if !new.is_empty() {
                        self.sink.write(new).await?;
                        self.download.took(new.len());
                        self.counts();
                    }
                }
                Some(Chunk::Trailers(trailers)) => content.trailers(&trailers),
                None => break,
            }
        }
        if skipping.prefix.is_some() {
            bail!(
                "the object changed at the origin after {} bytes had been written; write to a file with -o",
                self.download.held()
            );
        }
        let ended =
            if skipping.is_short() { Err("the response ended early".to_owned()) } else { self.download.ended(status) };
        match ended {
            Err(why) => {
                self.download.broke();
                Ok(AttemptOutcome::Later { why, after: None })
            }
            Ok(_) if !content.is_good() => self.mismatch(),
            Ok(End::More) => Ok(AttemptOutcome::More),
            Ok(End::Whole) => Ok(AttemptOutcome::Whole),
        }
    }

    fn counts(&self) {
        self.report.counts(self.download.held(), self.download.known().total);
    }

    /// Compares the data that a pipe's reader received with the beginning of this content.
    async fn compare(&mut self, prefix: Option<Hashes>) -> anyhow::Result<()> {
        let Some(prefix) = prefix else { return Ok(()) };
        let written = self.sink.digests(&Digests::default())?;
        if prefix.so_far().contradicts(&written) {
            bail!(
                "the object changed at the origin after {} bytes had been written; write to a file with -o",
                self.download.held()
            );
        }
        Ok(())
    }

    fn mismatch(&mut self) -> anyhow::Result<AttemptOutcome> {
        match self.download.failed_digest() {
            Verdict::Again => Ok(AttemptOutcome::Anew(MISMATCH)),
            _ => self.refuse(),
        }
    }

    fn refuse<T>(&mut self) -> anyhow::Result<T> {
        self.sink.discard();
        bail!("{MISMATCH}; the stored part was deleted. Check --digest, the origin and proxies between")
    }

    /// Verifies the object; `None` if the download must start again.
    async fn verify(&mut self) -> anyhow::Result<Option<Digests>> {
        if !self.download.expected().is_empty() {
            self.report.event(&Event::Verifies);
        }
        self.counts();
        let found = self.sink.digests(&self.download.expected())?;
        match self.download.verify(&found) {
            Verdict::Good => {
                self.sink.finish().context("complete, but")?;
                Ok(Some(found))
            }
            Verdict::Again => {
                self.report.event(&Event::Anew { why: MISMATCH });
                self.sink.restart()?;
                Ok(None)
            }
            Verdict::Bad => self.refuse(),
        }
    }
}

/// The part of a content to skip, and its announced length.
struct Skipping {
    left: u64,
    /// Hashes of the skipped part, if it must be compared.
    prefix: Option<Hashes>,
    /// Number of bytes still expected.
    announced: Option<u64>,
}

impl Skipping {
    fn new(take: &Take, status: u16) -> Self {
        let prefix = take.compare.then(|| Hashes::start([Algorithm::Sha256]));
        // hyper checks the length of complete responses.
        let announced = take.length.filter(|_| status == 206);
        Self { left: take.skip, prefix, announced }
    }

    /// Returns false if more bytes arrived than were announced.
    fn counts(&mut self, bytes: usize) -> bool {
        match self.announced.as_mut() {
            None => true,
            Some(left) => match left.checked_sub(bytes as u64) {
                Some(less) => {
                    *left = less;
                    true
                }
                None => false,
            },
        }
    }

    /// Returns the new part of the data.
    fn pass<'d>(&mut self, data: &'d [u8]) -> &'d [u8] {
        let skip = usize::try_from(self.left).unwrap_or(usize::MAX).min(data.len());
        let (known, new) = data.split_at(skip);
        self.left -= known.len() as u64;
        if let Some(prefix) = &mut self.prefix {
            prefix.update(known);
        }
        new
    }

    fn is_over(&self) -> bool {
        self.left == 0
    }

    fn is_short(&self) -> bool {
        self.left > 0 || self.announced.is_some_and(|left| left > 0)
    }
}

/// A response's content, and its expected digest (`Content-Digest`).
struct Content {
    expected: Digests,
    hashes: Hashes,
}

impl Content {
    fn new(head: &HeaderMap) -> Self {
        let expected = Digests::of(head, &digest::CONTENT);
        // Trailers may announce a digest, with an algorithm that is unknown until then.
        let later = head.get(HeaderName::from_static("trailer"));
        let comes_later = later.and_then(|names| names.to_str().ok()).is_some_and(|names| {
            names.split(',').any(|name| name.trim().eq_ignore_ascii_case(digest::CONTENT.as_str()))
        });
        let wanted = |algorithm: &Algorithm| comes_later || expected.iter().any(|(other, _)| other == *algorithm);
        let hashes = Hashes::start(Algorithm::ALL.into_iter().filter(wanted));
        Self { expected, hashes }
    }

    fn trailers(&mut self, trailers: &HeaderMap) {
        self.expected.join(&Digests::of(trailers, &digest::CONTENT));
    }

    fn is_good(&self) -> bool {
        !self.expected.contradicts(&self.hashes.so_far())
    }
}
