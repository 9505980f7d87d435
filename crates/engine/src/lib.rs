//! The loop: capture, tasks, agents, judge, assemble, gate; and the commands without their printing.

mod bench;
mod brief;
mod calibrate;
mod certificate;
mod contestants;
mod court;
mod desk;
mod doctor;
mod error;
mod event;
mod gate;
mod harvest;
mod hunt;
mod interrupt;
mod judge_file;
mod optimize;
mod options;
mod package;
mod profile;
mod replay;
mod report;
mod session;
mod tasks;
mod trial;

pub use bench::{BenchReport, bench};
pub use brief::{Brief, brief};
pub use calibrate::{CalibrateOptions, Calibration, Comparison, Durations, Series, calibrate};
pub use certificate::{CERTIFICATE_SCHEMA, Certificate, Claim};
pub use court::{Court, Point, Sitting, read_file};
pub use desk::{DeskSession, playbook};
pub use doctor::{CacheFacts, Check, CompilerFacts, CoreFacts, DoctorReport, Facts, PythonFacts, doctor};
pub use error::{EngineError, full_message};
pub use event::{EVENT_SCHEMA, Event, Observer, Silent};
pub use interrupt::interrupt;
pub use judge_file::{JudgeReport, judge_file};
pub use optimize::{is_running, optimize, resume};
pub use options::{ModelSpec, OptimizeOptions, parse_budget, parse_input};
pub use package::{Manifest, PACKAGE_SCHEMA};
pub use profile::profile;
pub use replay::{ReplayReport, replay};
pub use report::{
    Baseline, Break, CandidateCounts, Cost, DeviceReport, FormReport, LeftReport, ModelReport,
    OptimizeReport, ProfileReport, PutBackReport, RegionReport, Seconds, Speedups, Spread, Versions,
};
pub use session::{PythonChoice, Tools};
