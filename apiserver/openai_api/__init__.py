"""OpenAI's API over HTTP: requests as they are read, answers as they are written, and refusals."""
