//! The processes that rounds are made of, as the judge sees them.
//!
//! They are traits, so that tests can have children that lie.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use autokernel_core::dtype::Dtype;
use autokernel_core::graph::TensorMeta;
use autokernel_worker::python::{Peer, PeerError};
use serde::Deserialize;
use serde_json::{Value, json};

/// An output in a child's memory, as its reply says.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct RemoteTensor {
    /// Where its first element lies.
    pub address: u64,
    /// Bytes from there that belong to it.
    pub bytes: u64,
    /// Element type.
    pub dtype: Dtype,
    /// Size of each dimension.
    pub shape: Vec<u64>,
    /// Stride of each dimension in elements.
    pub stride: Vec<u64>,
}

impl RemoteTensor {
    /// Shape, strides and element type, as the child says.
    pub(crate) fn meta(&self) -> TensorMeta {
        TensorMeta { dtype: self.dtype, shape: self.shape.clone(), stride: self.stride.clone() }
    }
}

/// What a process says of its slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
pub struct Staged {
    /// Of a whole model: bytes of one draw.
    #[serde(default)]
    pub bytes: u64,
    /// Of a whole model: seconds that a draw takes.
    #[serde(default)]
    pub seconds: f64,
}

/// A process that runs one contestant.
pub trait Child {
    /// Makes slots for inputs: as many more as the request says of a region's, or all of a model's anew.
    fn stage(&mut self, body: Value, timeout: Duration) -> Result<Staged, PeerError>;
    /// Gives slots new content, of which the process has never seen anything before.
    fn refresh(
        &mut self,
        body: Value,
        content: Option<BorrowedFd<'_>>,
        timeout: Duration,
    ) -> Result<(), PeerError>;
    /// Calls the subject on these slots, back to back, and says nothing but that it is done:
    /// the time from sending the request to the complete reply, on the parent's clock.
    fn batch(&mut self, calls: &[usize], timeout: Duration) -> Result<Duration, PeerError>;
    /// Where the outputs of the last batch lie, by call and output.
    fn outputs(&mut self, timeout: Duration) -> Result<Vec<Vec<RemoteTensor>>, PeerError>;
    /// Frees them, outside of the next batch's time.
    fn release(&mut self, timeout: Duration) -> Result<(), PeerError>;
    /// Stops every thread.
    fn freeze(&self) -> Result<(), PeerError>;
    /// Lets them go on.
    fn thaw(&self) -> Result<(), PeerError>;
    /// Reads its memory while it stands still.
    fn read(&self, address: u64, bytes: &mut [u8]) -> io::Result<()>;
    /// Its process id.
    fn pid(&self) -> i32;
}

/// A process that has everything loaded and compiled, has run nothing, and forks children.
pub trait Zygote {
    /// A fresh child. Dropping it ends it.
    fn fork(&mut self) -> Result<Box<dyn Child>, PeerError>;
}

impl Zygote for Peer {
    fn fork(&mut self) -> Result<Box<dyn Child>, PeerError> {
        Ok(Box::new(Peer::fork(self)?))
    }
}

impl Child for Peer {
    fn stage(&mut self, body: Value, timeout: Duration) -> Result<Staged, PeerError> {
        let reply = self.request("stage", body, timeout)?;
        // Whatever the process needs once it has now; from here on a candidate's code may run.
        self.confine(timeout)?;
        serde_json::from_value(reply).map_err(|e| PeerError::Protocol { what: e.to_string() })
    }

    fn refresh(
        &mut self,
        body: Value,
        content: Option<BorrowedFd<'_>>,
        timeout: Duration,
    ) -> Result<(), PeerError> {
        match content {
            Some(content) => self.request_with("refresh", body, content, timeout),
            None => self.request("refresh", body, timeout),
        }
        .map(|_| ())
    }

    fn batch(&mut self, calls: &[usize], timeout: Duration) -> Result<Duration, PeerError> {
        // Without addresses: describing many small results would take as long as making them.
        let body = json!({ "calls": calls, "addresses": false });
        self.request_timed("batch", body, timeout).map(|(_, wall)| wall)
    }

    fn outputs(&mut self, timeout: Duration) -> Result<Vec<Vec<RemoteTensor>>, PeerError> {
        let mut reply = self.request("outputs", json!({}), timeout)?;
        serde_json::from_value(reply["outputs"].take())
            .map_err(|e| PeerError::Protocol { what: e.to_string() })
    }

    fn release(&mut self, timeout: Duration) -> Result<(), PeerError> {
        self.request("release", json!({}), timeout).map(|_| ())
    }

    fn freeze(&self) -> Result<(), PeerError> {
        Peer::freeze(self)
    }

    fn thaw(&self) -> Result<(), PeerError> {
        Peer::thaw(self)
    }

    fn read(&self, address: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.read_memory(address, bytes)
    }

    fn pid(&self) -> i32 {
        Peer::pid(self)
    }
}
