//! DNS messages (RFC 1035, RFC 6891) for a server that answers for some names and forwards queries for all others.
//!
//! In: a client's message, or another server's answer. Out: the question, its answer, and whether an answer matches it.
//! Forwarded messages keep their contents except for the id. Never: the resolution of a name, or a reply to a response.

use std::net::IpAddr;

use bytes::Bytes;
use hickory_proto::op::{Edns, Header, Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::rdata::PTR;
use hickory_proto::rr::{DNSClass, Name, RData, Record, RecordType};
use hickory_proto::serialize::binary::{BinDecodable, BinDecoder};

/// The length of a header, in bytes.
const HEADER: usize = 12;
/// The maximum UDP response for clients without EDNS (RFC 1035, section 4.2.1).
const MAX_PLAIN_UDP_RESPONSE: u16 = 512;
/// The maximum UDP response for all clients, since fragments get lost.
const MAX_UDP_RESPONSE: u16 = 4096;
/// The UDP payload size that we advertise: it fits any path (DNS flag day 2020).
const OWN_UDP_PAYLOAD: u16 = 1232;

/// A client's question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    id: u16,
    query: Query,
    recursion_desired: bool,
    /// The client's UDP payload size, if it uses EDNS.
    room: Option<u16>,
}

/// The reply to an invalid message, if one may be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal(pub Option<Bytes>);

/// The kind of a question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// IPv4 addresses.
    A,
    /// IPv6 addresses.
    Aaaa,
    /// The name of an address.
    Ptr,
    /// All records.
    Any,
    /// Any other type.
    Other,
}

/// The answer to a question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer<'a> {
    /// These addresses; an empty list means no data of this kind.
    Addresses(&'a [IpAddr]),
    /// The name of the address in the question.
    Name(&'a str),
    /// The name does not exist (NXDOMAIN).
    NoSuchName,
    /// The answer is temporarily not available (SERVFAIL).
    Failed,
}

impl Question {
    /// Parses a client's message.
    ///
    /// # Errors
    /// The message cannot be answered or forwarded.
    pub fn parse(bytes: &[u8]) -> Result<Self, Refusal> {
        let header = Header::read(&mut BinDecoder::new(bytes)).map_err(|_| Refusal(None))?;
        let metadata = header.metadata;
        if metadata.message_type == MessageType::Response {
            // A reply to a response could create an endless loop.
            return Err(Refusal(None));
        }
        let refuse = |code: ResponseCode| {
            let mut message = Message::error_msg(metadata.id, metadata.op_code, code);
            message.metadata.recursion_desired = metadata.recursion_desired;
            Refusal(message.to_vec().ok().map(Bytes::from))
        };
        if metadata.op_code != OpCode::Query {
            return Err(refuse(ResponseCode::NotImp));
        }
        let message = Message::from_vec(bytes).map_err(|_| refuse(ResponseCode::FormErr))?;
        let [query] = &message.queries[..] else { return Err(refuse(ResponseCode::FormErr)) };
        if message.version() > 0 {
            let mut refusal = Message::error_msg(metadata.id, metadata.op_code, ResponseCode::BADVERS);
            refusal.queries.push(query.clone());
            refusal.set_edns(edns(ResponseCode::BADVERS));
            return Err(Refusal(refusal.to_vec().ok().map(Bytes::from)));
        }
        Ok(Self {
            id: metadata.id,
            query: query.clone(),
            recursion_desired: metadata.recursion_desired,
            room: message.edns.as_ref().map(Edns::max_payload),
        })
    }

    /// The name in lower case, without its last dot. Bytes that are not valid in host names are escaped.
    pub fn name(&self) -> String {
        let mut name = self.query.name().to_ascii().to_ascii_lowercase();
        if name.ends_with('.') {
            name.pop();
        }
        name
    }

    /// The kind of the question. Classes other than IN are `Other`.
    pub fn kind(&self) -> Kind {
        match (self.query.query_class(), self.query.query_type()) {
            (DNSClass::IN, RecordType::A) => Kind::A,
            (DNSClass::IN, RecordType::AAAA) => Kind::Aaaa,
            (DNSClass::IN, RecordType::PTR) => Kind::Ptr,
            (DNSClass::IN, RecordType::ANY) => Kind::Any,
            _ => Kind::Other,
        }
    }

    /// Whether the question's class is IN.
    pub fn is_internet(&self) -> bool {
        self.query.query_class() == DNSClass::IN
    }

    /// The address of a name below `in-addr.arpa` or `ip6.arpa`.
    pub fn address(&self) -> Option<IpAddr> {
        let mut name = self.query.name().clone();
        name.set_fqdn(true);
        let net = name.parse_arpa_name().ok()?;
        (net.prefix_len() == net.max_prefix_len()).then(|| net.addr())
    }

    /// The largest UDP response for this client, in bytes.
    pub fn room(&self) -> usize {
        usize::from(self.room.unwrap_or(MAX_PLAIN_UDP_RESPONSE).clamp(MAX_PLAIN_UDP_RESPONSE, MAX_UDP_RESPONSE))
    }

    /// Encodes an answer, with the client's own spelling of the name. Clients may cache its records for `ttl` seconds.
    pub fn answer(&self, answer: &Answer<'_>, ttl: u32) -> Bytes {
        let mut message = Message::response(self.id, OpCode::Query);
        message.metadata.recursion_desired = self.recursion_desired;
        message.metadata.recursion_available = true;
        message.metadata.authoritative = *answer != Answer::Failed;
        message.metadata.response_code = match answer {
            Answer::Addresses(_) | Answer::Name(_) => ResponseCode::NoError,
            Answer::NoSuchName => ResponseCode::NXDomain,
            Answer::Failed => ResponseCode::ServFail,
        };
        message.queries.push(self.query.clone());
        let mut add = |data: RData| message.answers.push(Record::from_rdata(self.query.name().clone(), ttl, data));
        match answer {
            Answer::Addresses(addresses) => addresses.iter().for_each(|address| match address {
                IpAddr::V4(address) => add(RData::A((*address).into())),
                IpAddr::V6(address) => add(RData::AAAA((*address).into())),
            }),
            Answer::Name(name) => {
                if let Ok(name) = Name::from_ascii(format!("{name}.")) {
                    add(RData::PTR(PTR(name)));
                }
            }
            Answer::NoSuchName | Answer::Failed => {}
        }
        if self.room.is_some() {
            message.set_edns(edns(ResponseCode::NoError));
        }
        // A parsed question can be encoded, and so can the records that are added here.
        message.to_vec().unwrap_or_default().into()
    }

    /// Whether this message answers the question, if the query to the server had `id` (RFC 5452, section 9.1).
    pub fn is_answered_by(&self, id: u16, bytes: &[u8]) -> bool {
        let mut decoder = BinDecoder::new(bytes);
        let Ok(header) = Header::read(&mut decoder) else { return false };
        let metadata = header.metadata;
        if metadata.id != id || metadata.message_type != MessageType::Response || metadata.op_code != OpCode::Query {
            return false;
        }
        match header.counts.queries {
            1 => Query::read(&mut decoder).is_ok_and(|query| self.is_about(&query)),
            // Servers that cannot parse a question may leave it out.
            0 => is_complaint(metadata.response_code),
            _ => false,
        }
    }

    fn is_about(&self, query: &Query) -> bool {
        query.query_type() == self.query.query_type()
            && query.query_class() == self.query.query_class()
            // Names compare without regard to case.
            && query.name() == self.query.name()
    }

    /// Converts another server's answer for this client: sets its id, and truncates an answer longer than `room`, so
    /// that the client repeats the query over TCP.
    pub fn pass(&self, mut answer: Vec<u8>, room: usize) -> Bytes {
        if answer.len() > room {
            answer = self.cut(&answer);
        }
        with_id(&mut answer, self.id);
        answer.into()
    }

    /// A truncated answer: the header and the question, with the TC flag.
    fn cut(&self, answer: &[u8]) -> Vec<u8> {
        let mut message = Message::response(self.id, OpCode::Query);
        if let Ok(header) = Header::read(&mut BinDecoder::new(answer)) {
            message.metadata = header.metadata;
        }
        message.metadata.truncation = true;
        message.queries.push(self.query.clone());
        if self.room.is_some() {
            message.set_edns(edns(ResponseCode::NoError));
        }
        message.to_vec().unwrap_or_default()
    }
}

/// Our EDNS record, with the upper bits of a response code.
fn edns(code: ResponseCode) -> Edns {
    let mut edns = Edns::new();
    edns.set_max_payload(OWN_UDP_PAYLOAD).set_rcode_high(code.high());
    edns
}

fn is_complaint(code: ResponseCode) -> bool {
    matches!(code, ResponseCode::FormErr | ResponseCode::ServFail | ResponseCode::NotImp | ResponseCode::Refused)
}

/// Whether another server may have a better answer than this one.
pub fn is_failure(answer: &[u8]) -> bool {
    let header = Header::read(&mut BinDecoder::new(answer));
    header.is_ok_and(|header| {
        matches!(header.metadata.response_code, ResponseCode::ServFail | ResponseCode::NotImp | ResponseCode::Refused)
    })
}

/// Replaces the id of a message.
pub fn with_id(message: &mut [u8], id: u16) {
    if message.len() >= HEADER {
        message[..2].copy_from_slice(&id.to_be_bytes());
    }
}

#[cfg(test)]
mod tests;
