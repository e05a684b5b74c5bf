"""HTTP over engines: the OpenAI API, the KServe v2 protocol, health, metrics and a status page."""
