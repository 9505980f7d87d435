-- autokernel store, version 1. Rows are the truth; large things are files named by their BLAKE3 hash.
CREATE TABLE runs (
  id       TEXT PRIMARY KEY,
  created  TEXT NOT NULL,               -- RFC 3339, UTC
  options  TEXT NOT NULL,               -- JSON: what was asked
  facts    TEXT,                        -- JSON: device, versions, model, profile
  status   TEXT NOT NULL,               -- running | finished | interrupted | failed
  result   TEXT                         -- JSON: autokernel.optimize/1
) STRICT;

CREATE TABLE tasks (
  run      TEXT NOT NULL REFERENCES runs(id),
  region   TEXT NOT NULL,               -- canonical hash
  rank     INTEGER NOT NULL,            -- 0 is the most time to be won
  body     TEXT NOT NULL,               -- JSON: region, occurrences, contract, share, reach
  outcome  TEXT,                        -- JSON: set once the region is decided
  PRIMARY KEY (run, region)
) STRICT;

CREATE TABLE candidates (
  id       INTEGER PRIMARY KEY,
  run      TEXT NOT NULL,
  region   TEXT NOT NULL,
  agent    TEXT NOT NULL,
  created  TEXT NOT NULL,
  source   TEXT NOT NULL,               -- hash of the kernel file in files/
  params   TEXT NOT NULL,               -- JSON
  artefact TEXT,                        -- hash of the shared object
  screen   TEXT,                        -- JSON: rank among candidates, never a claim
  verdict  TEXT,                        -- JSON
  evidence TEXT,                        -- hash of autokernel.verdict/1 in files/
  FOREIGN KEY (run, region) REFERENCES tasks(run, region)
) STRICT;
CREATE INDEX candidates_by_region ON candidates(run, region);

CREATE TABLE events (
  id   INTEGER PRIMARY KEY,
  run  TEXT NOT NULL REFERENCES runs(id),
  at   TEXT NOT NULL,
  body TEXT NOT NULL                    -- JSON: autokernel.event/1
) STRICT;
