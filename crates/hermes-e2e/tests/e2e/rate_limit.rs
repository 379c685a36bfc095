//! Rate limits of services, kept by a real node for real clients: `pace`.

mod lab;
mod many_clients;
mod retries;
