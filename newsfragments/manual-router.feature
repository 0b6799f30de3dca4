llmgw-router(7): header fields, sessions, reasons of errors, what is charged, every metric and every field of the access log; tests hold it to the code.
