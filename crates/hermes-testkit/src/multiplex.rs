//! HTTP/2 peers of a test: a client with access to each stream, and an origin scripted for each stream.
//!
//! In: a connection, requests, bodies. Out: responses with interim responses and trailers, or the halves of a stream.
//! Frames are those of the `h2` crate; for invalid frames see [`crate::frames`]. Every wait is bounded.

use std::{io, net::SocketAddr};

use bytes::Bytes;
use h2::{RecvStream, SendStream, client::ResponseFuture, client::SendRequest, server::SendResponse};
use http::{HeaderMap, Request, Response};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    task::JoinSet,
};

use crate::raw_http1::in_time;

/// Windows and frames large enough to move 64 MiB without waiting at every step.
const WINDOW: u32 = 4 << 20;
const FRAME: u32 = 256 << 10;

/// A client's connection. Its driver task ends with it.
#[derive(Debug)]
pub struct Multiplex {
    sender: SendRequest<Bytes>,
    driver: JoinSet<Result<(), h2::Error>>,
}

/// The complete response to one request.
#[derive(Debug, Default)]
pub struct Answer {
    /// The final status.
    pub status: u16,
    /// The fields of the final head.
    pub headers: HeaderMap,
    /// The body.
    pub data: Vec<u8>,
    /// The trailers.
    pub trailers: Option<HeaderMap>,
    /// Statuses and fields of interim responses, in their order.
    pub interim: Vec<(u16, HeaderMap)>,
}

impl Answer {
    /// The values of a field, joined by commas.
    pub fn header(&self, name: &str) -> Option<String> {
        joined(&self.headers, name)
    }

    /// The values of a trailer field.
    pub fn trailer(&self, name: &str) -> Option<String> {
        joined(self.trailers.as_ref()?, name)
    }

    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.data).into_owned()
    }
}

/// The values of a field, joined by commas; `None` if it is absent.
pub fn joined(headers: &HeaderMap, name: &str) -> Option<String> {
    let values: Vec<_> = headers.get_all(name).iter().map(|v| String::from_utf8_lossy(v.as_bytes())).collect();
    (!values.is_empty()).then(|| values.join(", "))
}

impl Multiplex {
    /// Connects in plaintext, by prior knowledge.
    ///
    /// # Errors
    /// The connection failed, or the peer does not speak HTTP/2.
    pub async fn connect(address: SocketAddr) -> io::Result<Self> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Self::over(stream).await
    }

    /// Starts HTTP/2 over a stream. Returns once the peer's SETTINGS have arrived.
    ///
    /// # Errors
    /// The peer does not speak HTTP/2.
    pub async fn over(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) -> io::Result<Self> {
        let mut builder = h2::client::Builder::new();
        builder.initial_window_size(WINDOW).initial_connection_window_size(4 * WINDOW).max_frame_size(FRAME);
        // The limit stays zero until SETTINGS arrive, which shows their arrival.
        builder.initial_max_send_streams(0).enable_push(false).max_send_buffer_size(FRAME as usize);
        let (sender, connection) = builder.handshake::<_, Bytes>(stream).await.map_err(io::Error::other)?;
        let mut driver = JoinSet::new();
        driver.spawn(connection);
        let settings = async {
            while sender.current_max_send_streams() == 0 {
                if let Some(ended) = driver.try_join_next() {
                    return Err(io::Error::other(format!("the connection ended: {ended:?}")));
                }
                tokio::task::yield_now().await;
            }
            Ok(())
        };
        in_time("waiting for SETTINGS", settings).await?;
        Ok(Self { sender, driver })
    }

    /// Whether the peer supports extended CONNECT.
    pub fn takes_extended_connect(&self) -> bool {
        self.sender.is_extended_connect_protocol_enabled()
    }

    /// Opens a stream.
    ///
    /// # Errors
    /// The connection is closed.
    pub async fn open(&mut self, request: Request<()>, ends: bool) -> io::Result<(ResponseFuture, SendStream<Bytes>)> {
        let sender = self.sender.clone();
        let mut ready =
            in_time("waiting for a stream", async { sender.ready().await.map_err(io::Error::other) }).await?;
        ready.send_request(request, ends).map_err(io::Error::other)
    }

    /// Sends a request with its whole body, and reads the whole response.
    ///
    /// # Errors
    /// The stream or the connection was aborted.
    pub async fn ask(&mut self, request: Request<()>, body: &[u8]) -> io::Result<Answer> {
        let (response, mut stream) = self.open(request, body.is_empty()).await?;
        let sending = async {
            if !body.is_empty() {
                // A peer that responds early may reset the rest of the request.
                let _ = send_all(&mut stream, Bytes::copy_from_slice(body), true).await;
            }
            io::Result::Ok(())
        };
        let (answer, _) = tokio::try_join!(answer(response), sending)?;
        Ok(answer)
    }

    /// Sends a GET request.
    ///
    /// # Errors
    /// The errors of [`Self::ask`].
    pub async fn get(&mut self, uri: &str) -> io::Result<Answer> {
        let request = Request::get(uri).version(http::Version::HTTP_2).body(()).map_err(io::Error::other)?;
        self.ask(request, b"").await
    }

    /// Waits for the end of the connection, and returns its result.
    ///
    /// # Errors
    /// The connection stays open.
    pub async fn ended(mut self) -> io::Result<Result<(), h2::Error>> {
        drop(self.sender);
        let joined =
            in_time("waiting for the end of a connection", async { Ok(self.driver.join_next().await) }).await?;
        match joined {
            Some(Ok(result)) => Ok(result),
            other => Err(io::Error::other(format!("{other:?}"))),
        }
    }
}

/// Reads a whole response, including interim responses.
///
/// # Errors
/// The stream or the connection was aborted.
pub async fn answer(mut response: ResponseFuture) -> io::Result<Answer> {
    let mut interim = Vec::new();
    let head = in_time("waiting for a response", async {
        while let Some(head) = std::future::poll_fn(|cx| response.poll_informational(cx)).await {
            let (parts, ()) = head.map_err(io::Error::other)?.into_parts();
            interim.push((parts.status.as_u16(), parts.headers));
        }
        response.await.map_err(io::Error::other)
    });
    let (parts, body) = head.await?.into_parts();
    let (data, trailers) = receive_all(body).await?;
    Ok(Answer { status: parts.status.as_u16(), headers: parts.headers, data, trailers, interim })
}

/// Reads a body to its end.
///
/// # Errors
/// The body is truncated.
pub async fn receive_all(mut body: RecvStream) -> io::Result<(Vec<u8>, Option<HeaderMap>)> {
    let mut data = Vec::new();
    while let Some(chunk) = receive(&mut body).await? {
        data.extend_from_slice(&chunk);
    }
    let trailers = in_time("waiting for trailers", async { body.trailers().await.map_err(io::Error::other) }).await?;
    Ok((data, trailers))
}

/// Reads the next part of a body; `None` after the last one.
///
/// # Errors
/// The body is truncated.
pub async fn receive(body: &mut RecvStream) -> io::Result<Option<Bytes>> {
    match in_time("reading a body", async { body.data().await.transpose().map_err(io::Error::other) }).await? {
        Some(chunk) => {
            body.flow_control().release_capacity(chunk.len()).map_err(io::Error::other)?;
            Ok(Some(chunk))
        }
        None => Ok(None),
    }
}

/// Sends bytes under flow control.
///
/// # Errors
/// The peer reset the stream.
pub async fn send_all(stream: &mut SendStream<Bytes>, mut data: Bytes, ends: bool) -> io::Result<()> {
    while !data.is_empty() {
        stream.reserve_capacity(data.len());
        let grown = in_time("waiting for window", async {
            let capacity = std::future::poll_fn(|cx| stream.poll_capacity(cx)).await;
            capacity.transpose().map_err(io::Error::other)
        });
        let room = grown.await?.ok_or_else(|| io::Error::from(io::ErrorKind::BrokenPipe))?;
        let part = data.split_to(room.min(data.len()));
        stream.send_data(part, false).map_err(io::Error::other)?;
    }
    if ends { stream.send_data(Bytes::new(), true).map_err(io::Error::other) } else { Ok(()) }
}

/// A stream on the side of an origin.
#[derive(Debug)]
pub struct Exchange {
    /// The request, with an unread body.
    pub request: Request<RecvStream>,
    /// The handle for the response.
    pub respond: SendResponse<Bytes>,
}

impl Exchange {
    /// Responds with a whole body.
    ///
    /// # Errors
    /// The client closed the stream.
    pub async fn answer(mut self, response: Response<()>, body: impl Into<Bytes>) -> io::Result<()> {
        let mut stream = self.respond.send_response(response, false).map_err(io::Error::other)?;
        send_all(&mut stream, body.into(), true).await
    }
}

/// Serves one connection with extended CONNECT over any stream: `serve` handles each stream.
pub async fn serve_connection<T, F, S>(stream: T, serve: S)
where
    T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    F: Future<Output = io::Result<()>> + Send + 'static,
    S: Fn(Exchange) -> F,
{
    let mut builder = h2::server::Builder::new();
    builder.initial_window_size(WINDOW).initial_connection_window_size(4 * WINDOW).enable_connect_protocol();
    let Ok(mut connection) = builder.handshake::<_, Bytes>(stream).await else { return };
    let mut streams = JoinSet::new();
    loop {
        tokio::select! {
            accepted = connection.accept() => match accepted {
                Some(Ok((request, respond))) => drop(streams.spawn(serve(Exchange { request, respond }))),
                _ => return,
            },
            // The client evaluates the result of a stream.
            Some(_) = streams.join_next() => {}
        }
    }
}
