"""OpenAI's API over HTTP: the formats of requests and answers, the delivery of answers, and refusals."""
