//! Rate limits of services, kept by a real node for real clients: `upstream-rate-limit`.

mod lab;
mod many_clients;
mod retries;
