//! The effort: try, wait, try again, until all is there and verified.
//!
//! In: a URL, a client, a sink. Out: what it came to. It ends by itself only where no further try can help; the deadline is
//! its caller's, who ends it between any two bytes.

use std::time::{Duration, SystemTime};

use anyhow::{Context as _, bail};
use http::{HeaderMap, HeaderName, Uri};
use rand::Rng as _;
use tokio::time::Instant;

use super::client::{Client, Exchange, Piece, Trouble};
use super::digest::{self, Algorithm, Digests, Hashes};
use super::download::{Ask, Download, End, Meaning, Take, Verdict};
use super::report::{Event, Report};
use super::response::Answer;
use super::sink::Sink;
use super::{backoff, redirect};

/// Redirections in a row; more is a loop (browsers allow twenty, curl thirty).
const REDIRECTIONS: usize = 10;
/// The longest pause between two tries, where the origin asks for none that is longer.
const LONGEST: Duration = Duration::from_secs(30);
/// Said of content that has another digest than it should have.
const MISMATCH: &str = "what came is not what its digest says";

/// All that a fetch has.
pub(super) struct Effort<'a> {
    pub(super) url: Uri,
    pub(super) client: &'a Client,
    pub(super) download: &'a mut Download,
    pub(super) sink: &'a mut Sink,
    pub(super) report: &'a Report,
    pub(super) deadline: Instant,
}

/// What a try came to, where it brought no error that lasts.
enum Tried {
    /// Nothing is missing.
    Whole,
    /// A part came as it should; there is more.
    More,
    /// Ask again, without what was held.
    Anew(&'static str),
    /// Another time.
    Later { why: String, after: Option<Duration> },
}

impl Effort<'_> {
    /// Gets all of it. What it returns is what was verified.
    ///
    /// # Errors
    /// What no further try would change, with the next step.
    pub(super) async fn get(&mut self) -> anyhow::Result<Digests> {
        let mut fruitless = 0;
        loop {
            let held = self.download.held();
            let tried = self.attempt().await?;
            match tried {
                Tried::Whole => {
                    if let Some(found) = self.verify().await? {
                        return Ok(found);
                    }
                    continue;
                }
                Tried::More => {}
                Tried::Anew(why) => {
                    self.report.event(&Event::Anew { why });
                    self.sink.restart()?;
                    // It is asked again at once where that is new: an origin that says so each time is to be spared.
                    if fruitless == 0 {
                        fruitless = 1;
                        continue;
                    }
                    self.rest(fruitless, None, why).await;
                    fruitless += 1;
                    continue;
                }
                Tried::Later { why, after } => {
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
        let pause = backoff::pause(fruitless, after, left, LONGEST, rand::rng().random());
        self.report.event(&Event::Waits { why, pause });
        tokio::time::sleep(pause).await;
    }

    /// One request, with what it is redirected to, and its answer.
    async fn attempt(&mut self) -> anyhow::Result<Tried> {
        let ask = self.download.ask();
        let from = match &ask {
            Ask::Whole => 0,
            Ask::From(first, _) => *first,
        };
        self.report.event(&Event::Asks { from });
        let mut url = self.url.clone();
        for _ in 0..=REDIRECTIONS {
            let is_named = redirect::same_origin(&self.url, &url);
            let mut exchange = match self.client.send(&url, &ask, is_named).await {
                Ok(exchange) => exchange,
                Err(trouble) => return self.later(trouble),
            };
            let answer = Answer::read(&exchange.head, SystemTime::now());
            return Ok(match self.download.read(&ask, &answer) {
                Meaning::Elsewhere(location) => {
                    url = redirect::resolve(&url, &location)?;
                    continue;
                }
                Meaning::Content(take) => self.take(&mut exchange, answer.status, &take).await?,
                Meaning::Whole => Tried::Whole,
                Meaning::Later { why, after } => Tried::Later { why, after },
                Meaning::Anew(why) => Tried::Anew(why),
                Meaning::Never { why, remedy } => bail!("{why}; {remedy}"),
            });
        }
        bail!("redirected more than {REDIRECTIONS} times; look where that leads, and fetch the last URL itself");
    }

    fn later(&mut self, trouble: Trouble) -> anyhow::Result<Tried> {
        match trouble {
            Trouble::Passing { why, after } => Ok(Tried::Later { why, after }),
            Trouble::Lasting { why, remedy } => bail!("{why}; {remedy}"),
        }
    }

    /// Takes a response's content.
    async fn take(&mut self, exchange: &mut Exchange, status: u16, take: &Take) -> anyhow::Result<Tried> {
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
                Some(Piece::Data(data)) => {
                    content.hashes.update(&data);
                    if !skipping.counts(data.len()) {
                        self.download.broke();
                        let why = "more came than was announced".to_owned();
                        return Ok(Tried::Later { why, after: None });
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
                Some(Piece::Trailers(trailers)) => content.trailers(&trailers),
                None => break,
            }
        }
        if skipping.prefix.is_some() {
            bail!(
                "it changed at the origin after {} bytes had been written; write to a file with -o",
                self.download.held()
            );
        }
        let ended = if skipping.is_short() {
            Err("it ended before all that was announced had come".to_owned())
        } else {
            self.download.ended(status)
        };
        match ended {
            Err(why) => {
                self.download.broke();
                Ok(Tried::Later { why, after: None })
            }
            Ok(_) if !content.is_good() => self.mismatch(),
            Ok(End::More) => Ok(Tried::More),
            Ok(End::Whole) => Ok(Tried::Whole),
        }
    }

    fn counts(&self) {
        self.report.counts(self.download.held(), self.download.known().total);
    }

    /// What a pipe's reader has got must be how this begins.
    async fn compare(&mut self, prefix: Option<Hashes>) -> anyhow::Result<()> {
        let Some(prefix) = prefix else { return Ok(()) };
        let written = self.sink.digests(&Digests::default())?;
        if prefix.so_far().contradicts(&written) {
            bail!(
                "it changed at the origin after {} bytes had been written; write to a file with -o",
                self.download.held()
            );
        }
        Ok(())
    }

    fn mismatch(&mut self) -> anyhow::Result<Tried> {
        match self.download.failed_digest() {
            Verdict::Again => Ok(Tried::Anew(MISMATCH)),
            _ => self.refuse(),
        }
    }

    fn refuse<T>(&mut self) -> anyhow::Result<T> {
        self.sink.discard();
        bail!("{MISMATCH}, and what was held is gone; look whether --digest, the origin or something between is wrong")
    }

    /// `None` where it has to begin anew.
    async fn verify(&mut self) -> anyhow::Result<Option<Digests>> {
        if !self.download.expected().is_empty() {
            self.report.event(&Event::Verifies);
        }
        self.counts();
        let found = self.sink.digests(&self.download.expected())?;
        match self.download.judge(&found) {
            Verdict::Good => {
                self.sink.finish().context("all of it is held, but")?;
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

/// What is to be left out of a content, and how much may come.
struct Skipping {
    left: u64,
    /// What is left out, where it has to be compared.
    prefix: Option<Hashes>,
    /// So many bytes are still to come.
    announced: Option<u64>,
}

impl Skipping {
    fn new(take: &Take, status: u16) -> Self {
        let prefix = take.compare.then(|| Hashes::start([Algorithm::Sha256]));
        // Of a whole answer hyper sees to its length.
        let announced = take.length.filter(|_| status == 206);
        Self { left: take.skip, prefix, announced }
    }

    /// False where more came than was announced.
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

    /// What of it is new.
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

/// A response's content, and what it must come to (`Content-Digest`).
struct Content {
    expected: Digests,
    hashes: Hashes,
}

impl Content {
    fn new(head: &HeaderMap) -> Self {
        let expected = Digests::of(head, &digest::CONTENT);
        // It may be that trailers say it, of an algorithm that nobody knows before.
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
