-- Streamed answers to one question, for wrk: see docs/how-to/chat.md.
wrk.method = "POST"
wrk.path = "/v1/chat/completions"
wrk.headers["content-type"] = "application/json"
wrk.body = '{"model": "facts", "stream": true, "messages": [{"role": "user", "content": "Where does a plum grow?"}]}'
