//! Runs on disk.
//!
//! One SQLite database (write-ahead log, one transaction a candidate) beside a folder of
//! content-addressed files. A run killed at any moment keeps every candidate that was recorded.
//! The store knows no rules: bodies are JSON of the crates that own them.

mod files;
mod rows;

use std::path::{Path, PathBuf};

use rusqlite::Connection;

pub use files::FileId;
pub use rows::{Candidate, CandidateId, NewCandidate, RunRow, RunStatus, TaskRow};

/// The version of the database that this program reads and writes.
const VERSION: i64 = 1;

/// What went wrong with the store.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum StoreError {
    #[error("failed to use the store at {}: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
    #[error("the database {} is damaged or not ours ({reason}); it was left as it is: move it away to start afresh", path.display())]
    Damaged { path: PathBuf, reason: String },
    #[error("the database {} has version {found}, this program knows version {VERSION}; use a newer autokernel or set AUTOKERNEL_HOME to another folder", path.display())]
    Version { path: PathBuf, found: i64 },
    #[error("failed to write to the store: {0}")]
    Sql(#[from] rusqlite::Error),
    #[error("a stored record can't be read: {0}")]
    Json(#[from] serde_json::Error),
    #[error("no run named `{wanted}`{}", near.as_ref().map(|n| format!("; did you mean `{n}`?")).unwrap_or_default())]
    NoRun { wanted: String, near: Option<String> },
    #[error("run `{run}` has no region `{wanted}`; it has {}", have.join(", "))]
    NoRegion { run: String, wanted: String, have: Vec<String> },
    #[error("no stored verdict `{wanted}`: there is no such file, and no evidence under that name")]
    NoEvidence { wanted: String },
    #[error("stored file {0} is missing or does not match its hash")]
    File(String),
}

/// The open store.
pub struct Store {
    root: PathBuf,
    connection: Connection,
}

impl Store {
    /// `$AUTOKERNEL_HOME`, else `$XDG_DATA_HOME/autokernel`, else `~/.local/share/autokernel`.
    pub fn default_root() -> PathBuf {
        let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        set("AUTOKERNEL_HOME")
            .or_else(|| set("XDG_DATA_HOME").map(|dir| dir.join("autokernel")))
            .or_else(|| set("HOME").map(|dir| dir.join(".local/share/autokernel")))
            .unwrap_or_else(|| PathBuf::from(".autokernel"))
    }

    /// Opens the store under `root`, making it when it isn't there.
    pub fn open(root: &Path) -> Result<Self, StoreError> {
        fs_err::create_dir_all(root.join("files"))
            .map_err(|source| StoreError::Io { path: root.to_owned(), source })?;
        let path = root.join("autokernel.db");
        let damaged =
            |error: rusqlite::Error| StoreError::Damaged { path: path.clone(), reason: error.to_string() };
        let mut connection = Connection::open(&path).map_err(damaged)?;
        connection.busy_timeout(std::time::Duration::from_secs(10))?;
        connection.pragma_update(None, "journal_mode", "wal").map_err(damaged)?;
        connection.pragma_update(None, "synchronous", "normal")?;
        connection.pragma_update(None, "foreign_keys", "on")?;
        // Immediate: of two processes that open a new store, the second waits and then sees the tables.
        let transaction = connection
            .transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)
            .map_err(damaged)?;
        let found: i64 =
            transaction.pragma_query_value(None, "user_version", |row| row.get(0)).map_err(damaged)?;
        let tables: i64 = transaction
            .query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))
            .map_err(damaged)?;
        match (found, tables) {
            (0, 0) => {
                transaction.execute_batch(include_str!("schema.sql"))?;
                transaction.pragma_update(None, "user_version", VERSION)?;
            }
            (VERSION, _) => {}
            (0, _) => {
                return Err(StoreError::Damaged {
                    path: path.clone(),
                    reason: "tables of something else".to_owned(),
                });
            }
            _ => return Err(StoreError::Version { path: path.clone(), found }),
        }
        transaction.commit()?;
        Ok(Self { root: root.to_owned(), connection })
    }

    /// The folder of the store.
    pub fn root(&self) -> &Path {
        &self.root
    }
}

fn now() -> String {
    jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}
