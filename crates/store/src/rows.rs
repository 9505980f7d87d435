//! The rows: runs, tasks, candidates, events.

use rusqlite::{OptionalExtension, Row, params};
use serde::Serialize;
use serde_json::Value;

use crate::{FileId, Store, StoreError, now};

/// How a run stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RunStatus {
    /// Work goes on, or its process was killed.
    Running,
    /// It came to its end.
    Finished,
    /// A person stopped it; it can be resumed.
    Interrupted,
    /// It ended with an error.
    Failed,
}

impl RunStatus {
    const fn word(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Finished => "finished",
            Self::Interrupted => "interrupted",
            Self::Failed => "failed",
        }
    }

    fn from_word(word: &str) -> Self {
        match word {
            "finished" => Self::Finished,
            "interrupted" => Self::Interrupted,
            "failed" => Self::Failed,
            _ => Self::Running,
        }
    }
}

/// One `optimize`.
#[derive(Clone, Debug)]
pub struct RunRow {
    /// Its name.
    pub id: String,
    /// When it began, RFC 3339 in UTC.
    pub created: String,
    /// What was asked.
    pub options: Value,
    /// Device, versions, model, profile.
    pub facts: Option<Value>,
    /// How it stands.
    pub status: RunStatus,
    /// Its result.
    pub result: Option<Value>,
}

/// One region of a run.
#[derive(Clone, Debug)]
pub struct TaskRow {
    /// Canonical hash.
    pub region: String,
    /// Region, occurrences, contract, share, reach.
    pub body: Value,
    /// How it ended, once decided.
    pub outcome: Option<Value>,
}

/// Row number of a candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CandidateId(pub i64);

/// A candidate about to be recorded.
#[derive(Clone, Debug)]
pub struct NewCandidate<'a> {
    /// The run.
    pub run: &'a str,
    /// The region.
    pub region: &'a str,
    /// Who wrote it.
    pub agent: &'a str,
    /// The whole kernel file.
    pub source: &'a str,
    /// Chosen parameter values.
    pub params: Value,
    /// Hash of the artefact, when it was built.
    pub artefact: Option<&'a str>,
    /// What the screen said.
    pub screen: Option<Value>,
    /// What the judge decided.
    pub verdict: Option<Value>,
}

/// A recorded candidate.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// Row number.
    pub id: CandidateId,
    /// Who wrote it.
    pub agent: String,
    /// Hash of the kernel file.
    pub source: FileId,
    /// Chosen parameter values.
    pub params: Value,
    /// Hash of the artefact.
    pub artefact: Option<String>,
    /// What the screen said.
    pub screen: Option<Value>,
    /// What the judge decided.
    pub verdict: Option<Value>,
    /// Hash of the evidence file.
    pub evidence: Option<FileId>,
}

fn json(text: Option<String>) -> Result<Option<Value>, StoreError> {
    Ok(text.map(|text| serde_json::from_str(&text)).transpose()?)
}

type RawRun = (String, String, String, Option<String>, String, Option<String>);

fn raw_run(row: &Row<'_>) -> rusqlite::Result<RawRun> {
    Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?, row.get(4)?, row.get(5)?))
}

fn run_row((id, created, options, facts, status, result): RawRun) -> Result<RunRow, StoreError> {
    Ok(RunRow {
        id,
        created,
        options: serde_json::from_str(&options)?,
        facts: json(facts)?,
        status: RunStatus::from_word(&status),
        result: json(result)?,
    })
}

const RUN_COLUMNS: &str = "id, created, options, facts, status, result";

impl Store {
    /// Records a new run.
    pub fn create_run(&self, id: &str, options: &Value) -> Result<(), StoreError> {
        self.connection.execute(
            "INSERT INTO runs (id, created, options, status) VALUES (?1, ?2, ?3, 'running')",
            params![id, now(), options.to_string()],
        )?;
        Ok(())
    }

    /// Records device, versions, model and profile of a run.
    pub fn set_facts(&self, run: &str, facts: &Value) -> Result<(), StoreError> {
        self.connection
            .execute("UPDATE runs SET facts = ?2 WHERE id = ?1", params![run, facts.to_string()])?;
        Ok(())
    }

    /// Sets how a run stands, with its result if there is one.
    pub fn set_status(&self, run: &str, status: RunStatus, result: Option<&Value>) -> Result<(), StoreError> {
        self.connection.execute(
            "UPDATE runs SET status = ?2, result = coalesce(?3, result) WHERE id = ?1",
            params![run, status.word(), result.map(Value::to_string)],
        )?;
        Ok(())
    }

    /// All runs, newest first.
    pub fn runs(&self) -> Result<Vec<RunRow>, StoreError> {
        let mut statement = self
            .connection
            .prepare(&format!("SELECT {RUN_COLUMNS} FROM runs ORDER BY created DESC, rowid DESC"))?;
        let rows = statement.query_map([], raw_run)?.collect::<Result<Vec<_>, _>>()?;
        rows.into_iter().map(run_row).collect()
    }

    /// One run by its name, by an unambiguous beginning of it, or `last`.
    pub fn run(&self, wanted: &str) -> Result<RunRow, StoreError> {
        let runs = self.runs()?;
        let found = if wanted == "last" {
            runs.first()
        } else if let Some(exact) = runs.iter().find(|run| run.id == wanted) {
            Some(exact)
        } else {
            let mut matching = runs.iter().filter(|run| run.id.starts_with(wanted));
            matching.next().filter(|_| matching.next().is_none())
        };
        found.cloned().ok_or_else(|| StoreError::NoRun {
            wanted: wanted.to_owned(),
            near: runs.first().map(|run| run.id.clone()),
        })
    }

    /// Records the tasks of a run, in order of rank; tasks that are there keep their outcome.
    pub fn put_tasks(&mut self, run: &str, tasks: &[(String, Value)]) -> Result<(), StoreError> {
        let transaction = self.connection.transaction()?;
        for (rank, (region, body)) in tasks.iter().enumerate() {
            transaction.execute(
                "INSERT INTO tasks (run, region, rank, body) VALUES (?1, ?2, ?3, ?4)
                 ON CONFLICT (run, region) DO UPDATE SET rank = ?3, body = ?4",
                params![run, region, rank as i64, body.to_string()],
            )?;
        }
        transaction.commit()?;
        Ok(())
    }

    /// Records how a region ended.
    pub fn set_outcome(&self, run: &str, region: &str, outcome: &Value) -> Result<(), StoreError> {
        self.connection.execute(
            "UPDATE tasks SET outcome = ?3 WHERE run = ?1 AND region = ?2",
            params![run, region, outcome.to_string()],
        )?;
        Ok(())
    }

    /// The tasks of a run, by rank.
    pub fn tasks(&self, run: &str) -> Result<Vec<TaskRow>, StoreError> {
        let mut statement = self
            .connection
            .prepare("SELECT region, body, outcome FROM tasks WHERE run = ?1 ORDER BY rank")?;
        let rows = statement
            .query_map([run], |row| {
                Ok((row.get::<_, String>(0)?, row.get::<_, String>(1)?, row.get::<_, Option<String>>(2)?))
            })?
            .collect::<Result<Vec<_>, _>>()?;
        rows.into_iter()
            .map(|(region, body, outcome)| {
                Ok(TaskRow { region, body: serde_json::from_str(&body)?, outcome: json(outcome)? })
            })
            .collect()
    }

    /// One task by its rank, by the hash of its region, or by an unambiguous beginning of that. A short
    /// number is a rank: it is what `tasks` lists first, and too short to mean a hash.
    pub fn task(&self, run: &str, wanted: &str) -> Result<TaskRow, StoreError> {
        let tasks = self.tasks(run)?;
        let rank = wanted.parse::<usize>().ok().filter(|_| wanted.len() < 4);
        let by_hash: Vec<&TaskRow> = tasks.iter().filter(|task| task.region.starts_with(wanted)).collect();
        let found = match (rank.and_then(|rank| tasks.get(rank)), by_hash.as_slice()) {
            (Some(task), _) => Some(task),
            (None, [one]) => Some(*one),
            (None, _) => None,
        };
        found.cloned().ok_or_else(|| StoreError::NoRegion {
            run: run.to_owned(),
            wanted: wanted.to_owned(),
            have: tasks.iter().map(|task| task.region.clone()).collect(),
        })
    }

    /// Records a candidate: its kernel file first, then its row, in one transaction.
    pub fn record_candidate(&self, new: &NewCandidate<'_>) -> Result<CandidateId, StoreError> {
        let source = self.put_file(new.source.as_bytes())?;
        self.connection.execute(
            "INSERT INTO candidates (run, region, agent, created, source, params, artefact, screen, verdict)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)",
            params![
                new.run,
                new.region,
                new.agent,
                now(),
                source.0,
                new.params.to_string(),
                new.artefact,
                new.screen.as_ref().map(Value::to_string),
                new.verdict.as_ref().map(Value::to_string),
            ],
        )?;
        Ok(CandidateId(self.connection.last_insert_rowid()))
    }

    /// Records a later screen of a candidate in place of the one before.
    pub fn record_screen(&self, id: CandidateId, screen: &Value) -> Result<(), StoreError> {
        self.connection
            .execute("UPDATE candidates SET screen = ?2 WHERE id = ?1", params![id.0, screen.to_string()])?;
        Ok(())
    }

    /// Records that the judge turned a candidate away before it came to be compared.
    pub fn record_rejection(&self, id: CandidateId, verdict: &Value) -> Result<(), StoreError> {
        self.connection.execute(
            "UPDATE candidates SET verdict = ?2 WHERE id = ?1",
            params![id.0, verdict.to_string()],
        )?;
        Ok(())
    }

    /// Records the verdict on a candidate with the evidence from which it can be decided again; says
    /// under which hash that is kept.
    pub fn record_verdict(
        &self,
        id: CandidateId,
        verdict: &Value,
        evidence: &Value,
    ) -> Result<FileId, StoreError> {
        let evidence = self.put_file(evidence.to_string().as_bytes())?;
        self.connection.execute(
            "UPDATE candidates SET verdict = ?2, evidence = ?3 WHERE id = ?1",
            params![id.0, verdict.to_string(), evidence.0],
        )?;
        Ok(evidence)
    }

    /// The hash of stored evidence by an unambiguous beginning of it, of six digits at least.
    pub fn find_evidence(&self, wanted: &str) -> Result<Option<FileId>, StoreError> {
        if wanted.len() < 6 {
            return Ok(None);
        }
        let mut statement = self.connection.prepare(
            "SELECT DISTINCT evidence FROM candidates WHERE substr(evidence, 1, length(?1)) = ?1 LIMIT 2",
        )?;
        let found = statement.query_map([wanted], |row| row.get(0))?.collect::<Result<Vec<String>, _>>()?;
        Ok(<[String; 1]>::try_from(found).ok().map(|[one]| FileId(one)))
    }

    /// The candidates of one region of a run, in the order in which they came.
    pub fn candidates(&self, run: &str, region: &str) -> Result<Vec<Candidate>, StoreError> {
        let mut statement = self.connection.prepare(
            "SELECT id, agent, source, params, artefact, screen, verdict, evidence FROM candidates
             WHERE run = ?1 AND region = ?2 ORDER BY id",
        )?;
        let mut rows = statement.query(params![run, region])?;
        let mut candidates = vec![];
        while let Some(row) = rows.next()? {
            candidates.push(Candidate {
                id: CandidateId(row.get(0)?),
                agent: row.get(1)?,
                source: FileId(row.get(2)?),
                params: serde_json::from_str(&row.get::<_, String>(3)?)?,
                artefact: row.get(4)?,
                screen: json(row.get(5)?)?,
                verdict: json(row.get(6)?)?,
                evidence: row.get::<_, Option<String>>(7)?.map(FileId),
            });
        }
        Ok(candidates)
    }

    /// Appends an event of a run.
    pub fn record_event(&self, run: &str, body: &Value) -> Result<(), StoreError> {
        self.connection.execute(
            "INSERT INTO events (run, at, body) VALUES (?1, ?2, ?3)",
            params![run, now(), body.to_string()],
        )?;
        Ok(())
    }

    /// The latest event of a run, if any.
    pub fn last_event(&self, run: &str) -> Result<Option<Value>, StoreError> {
        let text: Option<String> = self
            .connection
            .query_row("SELECT body FROM events WHERE run = ?1 ORDER BY id DESC LIMIT 1", [run], |row| {
                row.get(0)
            })
            .optional()?;
        json(text)
    }
}
