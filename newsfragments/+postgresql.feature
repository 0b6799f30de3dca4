The store and its lease over PostgreSQL are there and tested; llmgw-server does not lead over them yet and refuses to start on one.
