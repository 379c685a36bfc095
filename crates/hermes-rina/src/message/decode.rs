//! The decoder of PDUs.
//!
//! In: a datagram, without the tag of management PDUs. Out: a message whose payload shares the datagram's memory, or an
//! error. Never: a panic, or memory that grows with a length field.

use super::*;

impl Message {
    /// Parses a datagram; a management PDU without its tag.
    ///
    /// # Errors
    /// The datagram is malformed.
    pub fn decode(mut from: Bytes) -> Result<Self, MessageError> {
        let version = from.try_get_u8()?;
        if version != VERSION {
            return Err(MessageError::Version(version));
        }
        let (kind, first, second) = (from.try_get_u8()?, from.try_get_u8()?, from.try_get_u8()?);
        if kind != 17 && second != 0 || matches!(kind, 1 | 6 | 7 | 18) && first != 0 {
            return Err(MessageError::Field("reserved byte"));
        }
        let message = match kind {
            1 => Message::Connect {
                nonce: array(&mut from)?,
                cookie: cookie(&mut from)?,
                mtu: from.try_get_u16()?,
                dif: text(&mut from, MAX_DIF_NAME)?,
            },
            2 => Message::ConnectReply(connect_reply(first, &mut from)?),
            3 => create(first, &mut from)?,
            4 => create_reply(first, &mut from)?,
            5 => Message::Delete {
                reason: Reason::from_number(first)?,
                to: from.try_get_u32()?,
                from: from.try_get_u32()?,
                port: from.try_get_u32()?,
            },
            6 => Message::DeleteReply { to: from.try_get_u32()?, from: from.try_get_u32()? },
            7 => Message::Release { nonce: array(&mut from)? },
            16 => {
                let header = data_header(first, &mut from)?;
                return Ok(Message::Data { header, payload: from });
            }
            17 => ack(first, second, &mut from)?,
            18 => {
                let (to, source, number) = (from.try_get_u32()?, from.try_get_u32()?, from.try_get_u32()?);
                return Ok(Message::Datagram { to, from: source, number, payload: from });
            }
            other => return Err(MessageError::Kind(other)),
        };
        if from.is_empty() { Ok(message) } else { Err(MessageError::Extra) }
    }
}

fn connect_reply(status: u8, from: &mut Bytes) -> Result<ConnectReply, MessageError> {
    if status == 2 {
        return Ok(ConnectReply::NotEnrolled { echo: array(from)? });
    }
    let (nonce, cookie, mtu) = (array(from)?, cookie(from)?, from.try_get_u16()?);
    match (status, mtu) {
        (0, mtu) => Ok(ConnectReply::Enrolled { nonce, cookie, mtu }),
        (1, 0) => Ok(ConnectReply::Challenge { nonce, cookie }),
        (3, 0) => Ok(ConnectReply::TooMany { nonce, cookie }),
        _ => Err(MessageError::Field("status")),
    }
}

fn create(qos: u8, from: &mut Bytes) -> Result<Message, MessageError> {
    let qos = match qos {
        0 => Qos::Reliable,
        1 => Qos::Unreliable,
        _ => return Err(MessageError::Field("QoS cube")),
    };
    let (port, cep, sequence, credit) =
        (from.try_get_u32()?, from.try_get_u32()?, sequence(from)?, from.try_get_u32()?);
    let source = AppName { process: text(from, MAX_NAME)?, instance: text(from, MAX_NAME)? };
    let destination = AppName { process: text(from, MAX_NAME)?, instance: text(from, MAX_NAME)? };
    Ok(Message::Create { qos, port, cep, sequence, credit, source, destination })
}

fn create_reply(result: u8, from: &mut Bytes) -> Result<Message, MessageError> {
    let (port, cep) = (from.try_get_u32()?, from.try_get_u32()?);
    let endpoint = Endpoint {
        port: from.try_get_u32()?,
        cep: from.try_get_u32()?,
        sequence: sequence(from)?,
        credit: from.try_get_u32()?,
    };
    let result = match result {
        0 => Ok(endpoint),
        _ if endpoint != Endpoint::default() => return Err(MessageError::Field("endpoint")),
        reason => Err(Reason::from_number(reason)?),
    };
    Ok(Message::CreateReply { port, cep, result })
}

fn data_header(flags: u8, from: &mut Bytes) -> Result<DataHeader, MessageError> {
    let (flags, has_echo) = Flags::parse(flags)?;
    Ok(DataHeader {
        to: from.try_get_u32()?,
        from: from.try_get_u32()?,
        flags,
        number: from.try_get_u32()?,
        sequence: sequence(from)?,
        ack: ack_info(has_echo, from)?,
    })
}

fn ack(flags: u8, count: u8, from: &mut Bytes) -> Result<Message, MessageError> {
    let (flags, has_echo) = Flags::parse(flags)?;
    if flags != Flags::default() || usize::from(count) > MAX_RANGES {
        return Err(MessageError::Field("flags"));
    }
    let (to, source) = (from.try_get_u32()?, from.try_get_u32()?);
    let ack = ack_info(has_echo, from)?;
    if from.len() != usize::from(count) * 8 {
        return Err(MessageError::Truncated);
    }
    let mut ranges = Vec::new();
    for _ in 0..count {
        ranges.push((from.try_get_u32()?, from.try_get_u32()?));
    }
    Ok(Message::Ack { to, from: source, ack, ranges })
}

fn ack_info(has_echo: bool, from: &mut Bytes) -> Result<AckInfo, MessageError> {
    let (sequence, credit, echo) = (sequence(from)?, from.try_get_u32()?, from.try_get_u32()?);
    if !has_echo && echo != 0 {
        return Err(MessageError::Field("echo"));
    }
    let echo = has_echo.then_some(echo);
    Ok(AckInfo { sequence, credit, echo, delay: from.try_get_u16()?, marks: from.try_get_u16()? })
}

fn sequence(from: &mut Bytes) -> Result<u64, MessageError> {
    let sequence = from.try_get_u64()?;
    if sequence > MAX_SEQUENCE { Err(MessageError::Field("sequence number")) } else { Ok(sequence) }
}

fn cookie(from: &mut Bytes) -> Result<Cookie, MessageError> {
    Ok(Cookie { issued: from.try_get_u64()?, mac: array(from)? })
}

fn array<const N: usize>(from: &mut Bytes) -> Result<[u8; N], MessageError> {
    let mut array = [0; N];
    from.try_copy_to_slice(&mut array)?;
    Ok(array)
}

fn text(from: &mut Bytes, max: usize) -> Result<String, MessageError> {
    let length = usize::from(from.try_get_u8()?);
    if length > max {
        return Err(MessageError::Field("length of a name"));
    }
    let bytes = from.get(..length).ok_or(MessageError::Truncated)?;
    let text = std::str::from_utf8(bytes).map_err(|_| MessageError::Field("name"))?.to_owned();
    from.advance(length);
    Ok(text)
}
