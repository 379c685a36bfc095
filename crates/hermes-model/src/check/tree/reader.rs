//! A serde deserialiser for a parsed tree. Its errors are data: the path and the fault.
//!
//! In: a tree of values. Out: a struct, or the first fault with its path.
//! Never: an empty value treated as absent. An operator who leaves `tls:` empty would get plaintext without noticing.

use std::fmt;

use serde::de::{self, DeserializeSeed, Expected, IntoDeserializer, MapAccess, SeqAccess, Unexpected, Visitor};

use super::{Step, Tree};

/// The fault at the end of a path.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::check) enum Fault {
    /// The last key of the path is unknown.
    UnknownField { expected: &'static [&'static str] },
    /// A required field is missing; the path does not contain its name.
    MissingField(&'static str),
    /// An unknown keyword.
    UnknownVariant { found: String, expected: &'static [&'static str] },
    /// A value of the wrong type.
    WrongType { found: String, expected: String },
    /// A complete message with its remedy.
    Message(String),
}

/// A fault and its path.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::check) struct FieldError {
    /// Innermost step first while the error propagates; outermost first in the result.
    pub(in crate::check) path: Vec<Step>,
    pub(in crate::check) fault: Fault,
}

impl FieldError {
    fn under(mut self, step: Step) -> Self {
        self.path.push(step);
        self
    }
}

impl From<Fault> for FieldError {
    fn from(fault: Fault) -> Self {
        Self { path: Vec::new(), fault }
    }
}

impl fmt::Display for FieldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.fault)
    }
}

impl std::error::Error for FieldError {}

impl de::Error for FieldError {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Fault::Message(message.to_string()).into()
    }

    fn invalid_type(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        if found == Unexpected::UnitVariant {
            return de::Error::custom("missing mapping after the key, such as hash: {header: NAME}");
        }
        Fault::WrongType { found: describe(found), expected: expectation(&expected.to_string()) }.into()
    }

    fn invalid_value(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Fault::WrongType { found: describe(found), expected: expectation(&expected.to_string()) }.into()
    }

    fn unknown_variant(found: &str, expected: &'static [&'static str]) -> Self {
        Fault::UnknownVariant { found: found.to_owned(), expected }.into()
    }

    fn unknown_field(_: &str, expected: &'static [&'static str]) -> Self {
        Fault::UnknownField { expected }.into()
    }

    fn missing_field(field: &'static str) -> Self {
        Fault::MissingField(field).into()
    }
}

fn describe(found: Unexpected<'_>) -> String {
    match found {
        Unexpected::Bool(value) => format!("boolean {value}"),
        Unexpected::Unsigned(value) => format!("number {value}"),
        Unexpected::Signed(value) => format!("number {value}"),
        Unexpected::Float(value) => format!("number {value}"),
        Unexpected::Str(text) => format!("string {text:?}"),
        Unexpected::Unit | Unexpected::Option => "nothing".to_owned(),
        Unexpected::Seq => "a list".to_owned(),
        Unexpected::Map => "a mapping".to_owned(),
        other => other.to_string(),
    }
}

/// Translates type names of serde into terms of YAML.
fn expectation(expected: &str) -> String {
    let term = match expected {
        "a boolean" => "true or false",
        "a sequence" => "a list",
        "u8" => "a number from 0 to 255",
        "u16" => "a number from 0 to 65535",
        "u32" => "a number from 0 to 4294967295",
        "u64" | "usize" => "an integer from 0",
        other if other == "a map" || other.starts_with("struct ") => "a mapping",
        other => other,
    };
    term.to_owned()
}

/// Deserialises a struct from a tree.
pub(in crate::check) fn read<T: de::DeserializeOwned>(tree: &Tree) -> Result<T, FieldError> {
    T::deserialize(tree).map_err(|mut error| {
        error.path.reverse();
        error
    })
}

impl Tree {
    fn found(&self) -> Unexpected<'_> {
        match self {
            Tree::Nothing | Tree::Removed => Unexpected::Unit,
            Tree::Bool(value) => Unexpected::Bool(*value),
            Tree::Unsigned(value) => Unexpected::Unsigned(*value),
            Tree::Signed(value) => Unexpected::Signed(*value),
            Tree::Float(value) => Unexpected::Float(*value),
            Tree::Text(text) => Unexpected::Str(text),
            Tree::List(_) => Unexpected::Seq,
            Tree::Section(_) => Unexpected::Map,
        }
    }
}

impl<'de> de::Deserializer<'de> for &Tree {
    type Error = FieldError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, FieldError> {
        match self {
            Tree::Nothing | Tree::Removed => Err(de::Error::invalid_type(Unexpected::Unit, &visitor)),
            Tree::Bool(value) => visitor.visit_bool(*value),
            Tree::Unsigned(value) => visitor.visit_u64(*value),
            Tree::Signed(value) => visitor.visit_i64(*value),
            Tree::Float(value) => visitor.visit_f64(*value),
            Tree::Text(text) => visitor.visit_str(text),
            Tree::List(items) => visitor.visit_seq(Items { items: items.iter().enumerate() }),
            Tree::Section(entries) => visitor.visit_map(Entries { entries: entries.iter(), entry: None }),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, FieldError> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, _: &'static str, visitor: V) -> Result<V::Value, FieldError> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, FieldError> {
        match self {
            Tree::Text(text) => visitor.visit_enum(text.as_str().into_deserializer()),
            Tree::Section(entries) => visitor.visit_enum(Variant { entries, variants }),
            _ => Err(de::Error::invalid_type(self.found(), &visitor)),
        }
    }

    /// Rejects lists: serde's derived code would accept one as the fields in order.
    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, FieldError> {
        match self {
            Tree::Section(_) => self.deserialize_any(visitor),
            _ => Err(de::Error::invalid_type(self.found(), &visitor)),
        }
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit
        unit_struct seq tuple tuple_struct map identifier ignored_any
    }
}

struct Items<'t> {
    items: std::iter::Enumerate<std::slice::Iter<'t, Tree>>,
}

impl<'de> SeqAccess<'de> for Items<'_> {
    type Error = FieldError;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, FieldError> {
        let Some((at, item)) = self.items.find(|(_, item)| **item != Tree::Removed) else { return Ok(None) };
        seed.deserialize(item).map(Some).map_err(|error| error.under(Step::Index(at)))
    }
}

struct Entries<'t> {
    entries: std::slice::Iter<'t, (String, Tree)>,
    entry: Option<&'t (String, Tree)>,
}

impl<'de> MapAccess<'de> for Entries<'_> {
    type Error = FieldError;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, FieldError> {
        self.entry = self.entries.next();
        let Some((key, _)) = self.entry else { return Ok(None) };
        let name: de::value::StrDeserializer<'_, FieldError> = key.as_str().into_deserializer();
        seed.deserialize(name).map(Some).map_err(|error| error.under(Step::Key(key.clone())))
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, FieldError> {
        match self.entry.take() {
            Some((key, value)) => seed.deserialize(value).map_err(|error| error.under(Step::Key(key.clone()))),
            None => Err(de::Error::custom("a value without a key")),
        }
    }
}

/// An enum with content: a mapping with one key, such as `hash: {header: X}`.
struct Variant<'t> {
    entries: &'t [(String, Tree)],
    variants: &'static [&'static str],
}

impl<'t, 'de> de::EnumAccess<'de> for Variant<'t> {
    type Error = FieldError;
    type Variant = Content<'t>;

    fn variant_seed<V: DeserializeSeed<'de>>(self, seed: V) -> Result<(V::Value, Content<'t>), FieldError> {
        let [(key, value)] = self.entries else {
            return Err(de::Error::custom(format!("expected exactly one of: {}", self.variants.join(", "))));
        };
        let name: de::value::StrDeserializer<'_, FieldError> = key.as_str().into_deserializer();
        Ok((seed.deserialize(name)?, Content { key, value }))
    }
}

struct Content<'t> {
    key: &'t str,
    value: &'t Tree,
}

impl<'de> de::VariantAccess<'de> for Content<'_> {
    type Error = FieldError;

    fn unit_variant(self) -> Result<(), FieldError> {
        Err(de::Error::custom(format!("{} has no value; use {} alone", self.key, self.key)))
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<T::Value, FieldError> {
        seed.deserialize(self.value).map_err(|error| error.under(Step::Key(self.key.to_owned())))
    }

    fn tuple_variant<V: Visitor<'de>>(self, _: usize, visitor: V) -> Result<V::Value, FieldError> {
        de::Deserializer::deserialize_any(self.value, visitor)
    }

    fn struct_variant<V: Visitor<'de>>(self, _: &'static [&'static str], visitor: V) -> Result<V::Value, FieldError> {
        de::Deserializer::deserialize_any(self.value, visitor)
    }
}
