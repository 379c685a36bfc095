//! The encoder of PDUs.
//!
//! In: a message. Out: its bytes, without the tag of management PDUs. Never: a check of the values; names that are too
//! long are cut, because their callers check them.

use super::*;

const FIN: u8 = 1;
const RESET: u8 = 2;
const MARK: u8 = 4;
const PROBE: u8 = 8;
const ECHO: u8 = 16;

impl Message {
    /// Appends the bytes of the message, without the tag.
    pub fn encode(&self, out: &mut BytesMut) {
        let mut head = |kind: u8, first: u8, second: u8| out.put_slice(&[VERSION, kind, first, second]);
        match self {
            Message::Connect { nonce, cookie, mtu, dif } => {
                head(1, 0, 0);
                out.put_slice(nonce);
                put_cookie(cookie, out);
                out.put_u16(*mtu);
                put_text(dif, MAX_DIF_NAME, out);
            }
            Message::ConnectReply(reply) => put_connect_reply(reply, out),
            Message::Create { qos, port, cep, sequence, credit, source, destination } => {
                head(3, u8::from(*qos == Qos::Unreliable), 0);
                out.put_u32(*port);
                out.put_u32(*cep);
                out.put_u64(*sequence);
                out.put_u32(*credit);
                for text in [&source.process, &source.instance, &destination.process, &destination.instance] {
                    put_text(text, MAX_NAME, out);
                }
            }
            Message::CreateReply { port, cep, result } => {
                head(4, result.as_ref().err().map_or(0, |reason| reason.number()), 0);
                let endpoint = result.unwrap_or_default();
                [*port, *cep, endpoint.port, endpoint.cep].into_iter().for_each(|number| out.put_u32(number));
                out.put_u64(endpoint.sequence);
                out.put_u32(endpoint.credit);
            }
            Message::Delete { reason, to, from, port } => {
                head(5, reason.number(), 0);
                [*to, *from, *port].into_iter().for_each(|number| out.put_u32(number));
            }
            Message::DeleteReply { to, from } => {
                head(6, 0, 0);
                [*to, *from].into_iter().for_each(|number| out.put_u32(number));
            }
            Message::Release { nonce } => {
                head(7, 0, 0);
                out.put_slice(nonce);
            }
            Message::Data { header, payload } => {
                header.encode(out);
                out.put_slice(payload);
            }
            Message::Ack { to, from, ack, ranges } => {
                let count = ranges.len().min(MAX_RANGES);
                head(17, echo_flag(ack), count as u8);
                out.put_u32(*to);
                out.put_u32(*from);
                put_ack(ack, out);
                for (offset, length) in ranges.iter().take(count) {
                    out.put_u32(*offset);
                    out.put_u32(*length);
                }
            }
            Message::Datagram { to, from, number, payload } => {
                head(18, 0, 0);
                [*to, *from, *number].into_iter().for_each(|number| out.put_u32(number));
                out.put_slice(payload);
            }
        }
    }
}

impl DataHeader {
    /// Appends the header of a data PDU; the payload follows.
    pub fn encode(&self, out: &mut BytesMut) {
        let flag = |is_set: bool, bit: u8| if is_set { bit } else { 0 };
        let flags = flag(self.flags.fin, FIN)
            | flag(self.flags.reset, RESET)
            | flag(self.flags.mark, MARK)
            | flag(self.flags.probe, PROBE)
            | echo_flag(&self.ack);
        let mut bytes = [0; DATA_HEADER];
        let mut to = &mut bytes[..];
        to.put_slice(&[VERSION, 16, flags, 0]);
        to.put_u32(self.to);
        to.put_u32(self.from);
        to.put_u32(self.number);
        to.put_u64(self.sequence);
        put_ack(&self.ack, &mut to);
        out.put_slice(&bytes);
    }
}

impl Flags {
    /// Parses the flags of a data PDU. Also returns whether the acknowledgement has an echo.
    pub(super) fn parse(bits: u8) -> Result<(Self, bool), MessageError> {
        if bits & !(FIN | RESET | MARK | PROBE | ECHO) != 0 {
            return Err(MessageError::Field("flags"));
        }
        let is_set = |bit: u8| bits & bit != 0;
        let flags = Flags { fin: is_set(FIN), reset: is_set(RESET), mark: is_set(MARK), probe: is_set(PROBE) };
        Ok((flags, is_set(ECHO)))
    }
}

fn echo_flag(ack: &AckInfo) -> u8 {
    if ack.echo.is_some() { ECHO } else { 0 }
}

fn put_ack(ack: &AckInfo, out: &mut impl BufMut) {
    out.put_u64(ack.sequence);
    out.put_u32(ack.credit);
    out.put_u32(ack.echo.unwrap_or_default());
    out.put_u16(ack.delay);
    out.put_u16(ack.marks);
}

fn put_connect_reply(reply: &ConnectReply, out: &mut BytesMut) {
    let (status, nonce, cookie, mtu) = match reply {
        ConnectReply::Challenge { nonce, cookie } => (1, nonce, cookie, 0),
        ConnectReply::Enrolled { nonce, cookie, mtu } => (0, nonce, cookie, *mtu),
        ConnectReply::TooMany { nonce, cookie } => (3, nonce, cookie, 0),
        ConnectReply::NotEnrolled { echo } => {
            out.put_slice(&[VERSION, 2, 2, 0]);
            return out.put_slice(echo);
        }
    };
    out.put_slice(&[VERSION, 2, status, 0]);
    out.put_slice(nonce);
    put_cookie(cookie, out);
    out.put_u16(mtu);
}

fn put_cookie(cookie: &Cookie, out: &mut BytesMut) {
    out.put_u64(cookie.issued);
    out.put_slice(&cookie.mac);
}

fn put_text(text: &str, max: usize, out: &mut BytesMut) {
    let mut end = text.len().min(max);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    out.put_u8(end as u8);
    out.put_slice(&text.as_bytes()[..end]);
}
