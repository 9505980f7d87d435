//! Content-addressed files: written once under their hash, checked when read.

use std::io::Write;
use std::path::PathBuf;

use crate::{Store, StoreError};

/// The BLAKE3 hash of a stored file, in hexadecimal.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct FileId(pub String);

impl Store {
    fn file_path(&self, id: &FileId) -> PathBuf {
        self.root.join("files").join(id.0.get(..2).unwrap_or("__")).join(&id.0)
    }

    /// Stores bytes; storing them again is free. Complete or absent after a crash: written beside,
    /// synced, then renamed.
    pub fn put_file(&self, bytes: &[u8]) -> Result<FileId, StoreError> {
        let id = FileId(blake3::hash(bytes).to_hex().to_string());
        let path = self.file_path(&id);
        if path.exists() {
            return Ok(id);
        }
        let io = |source| StoreError::Io { path: path.clone(), source };
        if let Some(folder) = path.parent() {
            fs_err::create_dir_all(folder).map_err(io)?;
        }
        let beside = path.with_extension(format!("{}.part", std::process::id()));
        let written = (|| {
            let mut file = fs_err::File::create(&beside)?;
            file.write_all(bytes)?;
            file.sync_all()?;
            fs_err::rename(&beside, &path)
        })();
        if written.is_err() {
            // A half-written file of a full disk must not stay; the first error is the one to tell.
            let _ = fs_err::remove_file(&beside);
        }
        written.map_err(io)?;
        Ok(id)
    }

    /// Reads a stored file and checks its hash.
    pub fn get_file(&self, id: &FileId) -> Result<Vec<u8>, StoreError> {
        let bytes = fs_err::read(self.file_path(id)).map_err(|_| StoreError::File(id.0.clone()))?;
        if blake3::hash(&bytes).to_hex().as_str() == id.0 {
            Ok(bytes)
        } else {
            Err(StoreError::File(id.0.clone()))
        }
    }
}
