//! Rate limits of services, kept by a real node for real clients: `pace`.

mod clients;
mod lab;
mod refusals;
