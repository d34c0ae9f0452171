"""A model behind HTTP and a web page: `app` is what is asked and answered, `server` the process around it."""
