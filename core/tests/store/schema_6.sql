PRAGMA application_id=1634167808;
PRAGMA user_version=6;
BEGIN TRANSACTION;
CREATE TABLE attempt_keys (  -- a number for each attempt, by which the other tables refer to it
    seq INTEGER PRIMARY KEY,
    rollout TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    UNIQUE (rollout, attempt)
);
INSERT INTO "attempt_keys" VALUES(1,'r',0);
INSERT INTO "attempt_keys" VALUES(2,'s',0);
CREATE TABLE attempts (
    seq INTEGER PRIMARY KEY,
    attempt_key INTEGER NOT NULL,
    worker TEXT NOT NULL,
    started REAL NOT NULL,
    ended REAL,
    ending TEXT,
    result TEXT NOT NULL,
    error TEXT, passed_through TEXT,
    UNIQUE (attempt_key)
);
INSERT INTO "attempts" VALUES(1,1,'w',0.0,1.0,'finished','"answer"',NULL,NULL);
CREATE TABLE calls (
    seq INTEGER PRIMARY KEY,
    attempt_key INTEGER NOT NULL,
    id TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    policy TEXT NOT NULL,
    version INTEGER,
    request TEXT NOT NULL,  -- lists of objects (messages, tools) are null here
    request_lists TEXT NOT NULL,  -- the length of each such list
    request_pieces BLOB NOT NULL,  -- the int64 numbers of their items in pieces
    n_choices INTEGER NOT NULL,
    started REAL NOT NULL,
    ended REAL NOT NULL,
    api TEXT NOT NULL,
    agent TEXT,
    parent_span TEXT,
    prompt_blocks BLOB,  -- the int64 numbers of full blocks of prompt tokens in pieces; NULL: no ids
    prompt_tail BLOB,  -- the int32 tokens after them
    requested TEXT NOT NULL,
    effective TEXT NOT NULL,
    prefix_broken INTEGER NOT NULL,
    prefilled INTEGER NOT NULL,
    reused INTEGER NOT NULL,
    late INTEGER NOT NULL,
    retry_of TEXT, state TEXT, pruned INTEGER NOT NULL DEFAULT 0, undelivered INTEGER NOT NULL DEFAULT 0, stamped INTEGER NOT NULL DEFAULT 1,
    UNIQUE (attempt_key, id)
);
INSERT INTO "calls" VALUES(1,1,'a',0,'default',3,'{"model":"default","messages":null}','{"messages":1}',X'0100000000000000',1,0.0,0.5,'chat.completions',NULL,NULL,X'',X'00000000010000000200000003000000','{}','{"temperature":0.7,"top_p":1.0,"max_tokens":8,"seed":1}',0,0,0,0,NULL,NULL,0,0,1);
INSERT INTO "calls" VALUES(2,2,'b',0,'default',3,'{"model":"default","messages":null}','{"messages":1}',X'0200000000000000',1,0.0,0.5,'chat.completions',NULL,NULL,X'',X'00000000010000000200000003000000','{}','{"temperature":0.7,"top_p":1.0,"max_tokens":8,"seed":1}',0,0,0,0,NULL,NULL,0,0,1);
CREATE TABLE choices (
    seq INTEGER PRIMARY KEY,
    attempt_key INTEGER NOT NULL,
    call TEXT NOT NULL,
    position INTEGER NOT NULL,  -- 0 ... n_choices - 1 of its call
    choice INTEGER NOT NULL,
    message TEXT NOT NULL,
    finish_reason TEXT NOT NULL,
    response_ids BLOB,  -- int32
    logprobs BLOB,  -- float32
    mask BLOB,  -- the number of unused bits, then packed bits
    parse_error TEXT,
    UNIQUE (attempt_key, call, position)
);
INSERT INTO "choices" VALUES(1,1,'a',0,0,'{"role":"assistant","content":"hi"}','stop',X'000000000100000002000000',X'000000BF000000BF000000BF',NULL,NULL);
INSERT INTO "choices" VALUES(2,2,'b',0,0,'{"role":"assistant","content":"hi"}','stop',X'000000000100000002000000',X'000000BF000000BF000000BF',NULL,NULL);
CREATE TABLE pieces (  -- messages, tool schemas and blocks of prompt tokens
    seq INTEGER PRIMARY KEY,
    data NOT NULL  -- JSON text, or int32 tokens
);
INSERT INTO "pieces" VALUES(1,'{"role":"user","content":"a"}');
INSERT INTO "pieces" VALUES(2,'{"role":"user","content":"b"}');
CREATE TABLE rewards (
    seq INTEGER PRIMARY KEY,
    attempt_key INTEGER NOT NULL,
    name TEXT NOT NULL,
    value REAL NOT NULL,
    source TEXT NOT NULL,
    call TEXT,
    choice INTEGER NOT NULL
);
CREATE TABLE rollouts (
    seq INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    run TEXT NOT NULL,
    restart INTEGER NOT NULL,
    grp TEXT NOT NULL,
    task TEXT NOT NULL,
    mode TEXT NOT NULL,
    step INTEGER NOT NULL,
    member INTEGER NOT NULL,
    state TEXT NOT NULL,
    counted_attempt INTEGER,
    ending TEXT
, position INTEGER NOT NULL DEFAULT 0);
INSERT INTO "rollouts" VALUES(1,'r','run',0,'g','{"id":"t","input":{"question":"?"},"split":"train","metadata":{}}','train',0,0,'queued',NULL,NULL,0);
INSERT INTO "rollouts" VALUES(2,'s','run',0,'g','{"id":"t","input":{"question":"?"},"split":"train","metadata":{}}','train',0,0,'queued',NULL,NULL,0);
CREATE TABLE runs (
    seq INTEGER PRIMARY KEY,
    id TEXT NOT NULL,
    restart INTEGER NOT NULL,
    started REAL NOT NULL,
    config TEXT NOT NULL,
    resumed_step INTEGER,
    UNIQUE (id, restart)
);
CREATE TABLE tool_results (
    seq INTEGER PRIMARY KEY,
    attempt_key INTEGER NOT NULL,
    id TEXT NOT NULL,
    tool TEXT NOT NULL,
    status TEXT NOT NULL,
    tool_call_id TEXT,
    arguments TEXT NOT NULL,
    result TEXT NOT NULL,
    error TEXT,
    agent TEXT,
    span TEXT,
    parent_span TEXT,
    started REAL,
    ended REAL,
    source TEXT NOT NULL,
    adapter TEXT, status_rule TEXT,
    UNIQUE (attempt_key, source, id)
);
CREATE TABLE "training_records" (
    seq INTEGER PRIMARY KEY,
    attempt_key INTEGER NOT NULL,
    call TEXT NOT NULL,
    choice INTEGER NOT NULL,
    step INTEGER NOT NULL,
    credit REAL,
    advantage REAL,
    weight REAL NOT NULL,
    dropped TEXT,
    UNIQUE (attempt_key, call, choice, step)
);
CREATE INDEX rollouts_of_step ON rollouts (run, step);
CREATE INDEX rollouts_of_group ON rollouts (grp);
CREATE INDEX rollouts_in_state ON rollouts (state);
CREATE UNIQUE INDEX rewards_key ON rewards (attempt_key, name, source, ifnull(call, x''), choice);
COMMIT;
