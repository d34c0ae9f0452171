"""HTTP server and web page for a model: `app` defines the API, `server` runs it."""
