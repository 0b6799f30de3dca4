A store is copied from SQLite to PostgreSQL, and back, by `llmgw store copy`, which counts what arrived; `llmgw store backup FILE` writes a whole copy of either beside the running server.
