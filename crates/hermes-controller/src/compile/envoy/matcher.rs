//! xDS matchers with ordered maps: `xds.type.matcher.v3.Matcher`, and the messages that contain it.
//!
//! In: keys and their results. Out: the wire format of the messages of the same names. Equal messages have equal bytes,
//! because a digest of the bytes is the version of a resource. Generated messages have maps in random order.

use std::collections::BTreeMap;

use envoy_types::pb::envoy::config::rbac::v3::Action;
use envoy_types::pb::envoy::config::route::v3::{Route, RouteList};
use envoy_types::pb::envoy::extensions::matching::common_inputs::ssl::v3::UriSanInput;
use envoy_types::pb::envoy::r#type::matcher::v3::HttpRequestHeaderMatchInput;
use envoy_types::pb::google::protobuf::Any;
use envoy_types::pb::xds::core::v3::TypedExtensionConfig;
use envoy_types::pb::xds::r#type::matcher::v3::StringMatcher;
use envoy_types::pb::xds::r#type::matcher::v3::matcher::matcher_list::predicate::{
    MatchType, SinglePredicate, single_predicate::Matcher as Value,
};
use envoy_types::pb::xds::r#type::matcher::v3::matcher::matcher_list::{FieldMatcher, Predicate};
use envoy_types::pb::xds::r#type::matcher::v3::matcher::{self, MatcherList};
use envoy_types::pb::xds::r#type::matcher::v3::string_matcher::MatchPattern;
use hermes_model::trust::HERMES_USER;

/// `envoy.config.route.v3.RouteConfiguration`
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct RouteConfiguration {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(message, repeated, tag = "2")]
    pub(super) virtual_hosts: Vec<VirtualHost>,
    #[prost(btree_map = "string, message", tag = "16")]
    pub(super) typed_per_filter_config: BTreeMap<String, Any>,
}

/// `envoy.config.route.v3.VirtualHost`
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct VirtualHost {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(string, repeated, tag = "2")]
    pub(super) domains: Vec<String>,
    /// Used if there is no matcher.
    #[prost(message, repeated, tag = "3")]
    pub(super) routes: Vec<Route>,
    #[prost(message, optional, tag = "21")]
    pub(super) matcher: Option<Matcher>,
}

/// `envoy.extensions.filters.http.rbac.v3.RBACPerRoute`
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct RbacPerRoute {
    #[prost(message, optional, tag = "2")]
    pub(super) rbac: Option<Rbac>,
}

/// `envoy.extensions.filters.http.rbac.v3.RBAC`
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Rbac {
    #[prost(message, optional, tag = "4")]
    pub(super) matcher: Option<Matcher>,
}

/// `xds.type.matcher.v3.Matcher`: a list or a tree, and a default.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Matcher {
    #[prost(message, optional, tag = "1")]
    list: Option<MatcherList>,
    #[prost(message, optional, tag = "2")]
    tree: Option<Tree>,
    #[prost(message, optional, boxed, tag = "3")]
    on_no_match: Option<Box<OnMatch>>,
}

/// `Matcher.OnMatch`
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct OnMatch {
    #[prost(message, optional, boxed, tag = "1")]
    matcher: Option<Box<Matcher>>,
    #[prost(message, optional, tag = "2")]
    action: Option<TypedExtensionConfig>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Tree {
    #[prost(message, optional, tag = "1")]
    input: Option<TypedExtensionConfig>,
    #[prost(message, optional, tag = "2")]
    exact: Option<MatchMap>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct MatchMap {
    #[prost(btree_map = "string, message", tag = "1")]
    map: BTreeMap<String, OnMatch>,
}

impl Matcher {
    /// Creates a matcher that looks up the input in a map, with a default. The map must not be empty.
    pub(super) fn tree(
        input: TypedExtensionConfig,
        map: BTreeMap<String, OnMatch>,
        otherwise: Option<OnMatch>,
    ) -> Self {
        let tree = Tree { input: Some(input), exact: Some(MatchMap { map }) };
        Self { list: None, tree: Some(tree), on_no_match: otherwise.map(Box::new) }
    }

    /// Creates a matcher that takes the action of the first case that matches.
    pub(super) fn list(cases: impl IntoIterator<Item = (Predicate, TypedExtensionConfig)>) -> Self {
        let matchers = cases.into_iter().map(|(predicate, action)| FieldMatcher {
            predicate: Some(predicate),
            on_match: Some(matcher::OnMatch {
                on_match: Some(matcher::on_match::OnMatch::Action(action)),
                ..matcher::OnMatch::default()
            }),
        });
        Self { list: Some(MatcherList { matchers: matchers.collect() }), tree: None, on_no_match: None }
    }
}

impl From<TypedExtensionConfig> for OnMatch {
    fn from(action: TypedExtensionConfig) -> Self {
        Self { matcher: None, action: Some(action) }
    }
}

impl From<Matcher> for OnMatch {
    fn from(matcher: Matcher) -> Self {
        Self { matcher: Some(Box::new(matcher)), action: None }
    }
}

fn extension<M: prost::Message + prost::Name>(name: &str, message: &M) -> TypedExtensionConfig {
    TypedExtensionConfig { name: name.to_owned(), typed_config: Some(super::pack(message)) }
}

/// Returns the input with the URIs of the peer's certificate, separated by commas.
pub(super) fn peer() -> TypedExtensionConfig {
    extension("peer", &UriSanInput {})
}

/// Returns the input with the request's user claim. Several header lines are joined with commas, which no user's name
/// contains.
pub(super) fn user() -> TypedExtensionConfig {
    extension("user", &HttpRequestHeaderMatchInput { header_name: HERMES_USER.as_str().to_owned() })
}

/// Returns the action that allows the request.
pub(super) fn allow() -> TypedExtensionConfig {
    // Action 0 is ALLOW.
    extension("allow", &Action { name: "allow".to_owned(), ..Action::default() })
}

/// Returns the action that takes the first route that matches.
pub(super) fn routes(routes: Vec<Route>) -> TypedExtensionConfig {
    extension("routes", &RouteList { routes })
}

fn single(input: TypedExtensionConfig, pattern: MatchPattern) -> Predicate {
    let value = StringMatcher { match_pattern: Some(pattern), ..StringMatcher::default() };
    let single = SinglePredicate { input: Some(input), matcher: Some(Value::ValueMatch(value)) };
    Predicate { match_type: Some(MatchType::SinglePredicate(single)) }
}

/// True if the peer's certificate has this URI, which contains no comma.
pub(super) fn peer_is(uri: String) -> Predicate {
    single(peer(), MatchPattern::Contains(uri))
}

/// True if the request has no user claim.
pub(super) fn nobody() -> Predicate {
    use envoy_types::pb::xds::r#type::matcher::v3::{RegexMatcher, regex_matcher};
    let engine_type = Some(regex_matcher::EngineType::GoogleRe2(regex_matcher::GoogleRe2 {}));
    let anything = RegexMatcher { regex: ".*".to_owned(), engine_type };
    let somebody = single(user(), MatchPattern::SafeRegex(anything));
    Predicate { match_type: Some(MatchType::NotMatcher(Box::new(somebody))) }
}
