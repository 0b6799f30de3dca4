The store can be PostgreSQL: several servers contend for the lead by a lease, and `llmgw.store.copy` moves a fleet there.
