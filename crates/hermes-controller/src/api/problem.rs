//! Errors of the REST API, as problem details (RFC 9457).
//!
//! In: refused changes and faults of documents. Out: an HTTP status and a JSON body.

use axum::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header};
use serde_json::json;

use crate::controller::ApplyError;
use crate::document;

/// Problem details (RFC 9457).
pub(super) struct Problem {
    status: StatusCode,
    pub(super) detail: String,
    faults: Vec<serde_json::Value>,
}

impl Problem {
    pub(super) fn new(status: StatusCode, detail: impl Into<String>) -> Self {
        Self { status, detail: detail.into(), faults: Vec::new() }
    }
}

impl From<ApplyError> for Problem {
    fn from(refused: ApplyError) -> Self {
        let status = match &refused {
            ApplyError::Faults(_) => StatusCode::UNPROCESSABLE_ENTITY,
            ApplyError::Unusable(_) => StatusCode::UNPROCESSABLE_ENTITY,
            ApplyError::Conflict { .. } | ApplyError::Busy(_) | ApplyError::Turn | ApplyError::NotReady(_) => {
                StatusCode::CONFLICT
            }
            ApplyError::Denied(_) => StatusCode::FORBIDDEN,
            ApplyError::Absent(_) | ApplyError::Unknown(_) => StatusCode::NOT_FOUND,
            // The store has not answered, so that it is unknown whether the change was made.
            refused if refused.is_unknown() => StatusCode::GATEWAY_TIMEOUT,
            ApplyError::Store(_) => StatusCode::SERVICE_UNAVAILABLE,
        };
        match refused {
            ApplyError::Faults(faults) => Self::of_faults(&faults),
            refused => Self::new(status, refused.to_string()),
        }
    }
}

impl Problem {
    pub(super) fn of_faults(faults: &[document::Fault]) -> Self {
        let detail = format!("nothing was changed: {} problems", faults.len());
        Self { status: StatusCode::UNPROCESSABLE_ENTITY, detail, faults: faults.iter().map(fault_to_json).collect() }
    }
}

/// Returns a fault as JSON.
pub(super) fn fault_to_json(fault: &document::Fault) -> serde_json::Value {
    json!({
        "document": fault.key.as_ref().map(ToString::to_string),
        "number": fault.number,
        "path": fault.problem.path,
        "message": fault.problem.message,
    })
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let Self { status, detail, faults } = self;
        let mut body = json!({ "title": status.canonical_reason(), "status": status.as_u16(), "detail": detail });
        if !faults.is_empty() {
            body["problems"] = faults.into();
        }
        let mut response = (status, axum::Json(body)).into_response();
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        response
    }
}
