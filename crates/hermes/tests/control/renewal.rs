//! Certificates that live for seconds, under traffic: they are renewed in time, and no request fails.

use crate::bed::{Bed, until};

#[tokio::test]
async fn certificates_are_renewed_under_traffic() {
    let bed = Bed::new().await;
    bed.origin(7001, "one");
    let documents = bed.documents(7001).replace("name: test\n", "name: test\ncertificate-life: 6s\n");
    bed.told(&["apply", "-f", "-"], &documents);
    let _laptop = bed.node("laptop", Some(&bed.token("laptop")));
    let _server = bed.node("server", Some(&bed.token("server")));
    bed.until_answers("APP", "one").await;
    let renewals = |node: &str| bed.log(node).matches("the certificate is renewed").count();
    let mut requests = 0;
    // The first ones are over by then.
    while renewals("laptop") < 3 || renewals("server") < 3 {
        assert_eq!(bed.get("APP"), Some((200, "one".to_owned())), "request {requests}");
        requests += 1;
        assert!(requests < 100_000, "nothing is renewed: {}", bed.log("laptop"));
    }
    assert!(requests > 20, "{requests}");
    until("both run what they should", || bed.told(&["node", "list"], "").matches(" running\n").count() == 2).await;
}
