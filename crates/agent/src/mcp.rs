//! The desk as a server of the Model Context Protocol, on stdin and stdout.
//!
//! The desk lives on a thread of its own and takes one request after the other; a client that leaves
//! in the middle of one does not disturb it, and the result is in the store.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock, Implementation, ListToolsResult,
    PaginatedRequestParams, ServerCapabilities, ServerConfig, Tool,
};
use rmcp::service::RequestContext;
use rmcp::{ErrorData, RoleServer, ServerHandler, ServiceExt};
use serde_json::{Value, json};
use tokio::sync::oneshot;

use crate::desk::{Answer, Desk, DeskError};
use crate::verbs::{call, verbs};

/// What a client is told when it connects.
const INSTRUCTIONS: &str = "You write kernels for regions of a PyTorch model. Start with `tasks`, read the `brief` of a region, \
write one kernel file, hand it to `judge` (or `sweep` when it has [params]), read what was wrong or slow, and write the next. \
`history` and `playbook` help. `finish` puts the winners into a package. Only verdicts count: a screen is noisy.";

/// Why serving ended early.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum McpError {
    #[error("no runtime for the protocol: {0}")]
    Runtime(std::io::Error),
    #[error("the client did not speak the protocol: {0}")]
    Protocol(String),
}

/// Serves the desk that `open` gives on stdin and stdout until the client is gone. A desk stays on the
/// thread on which it was opened; why none could be is the answer to every request.
pub fn serve_stdio(
    open: impl FnOnce() -> Result<Box<dyn Desk>, String> + Send + 'static,
) -> Result<(), McpError> {
    let (requests, jobs) = channel();
    let worker = std::thread::spawn(move || work(open(), &jobs));
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(McpError::Runtime)?;
    let served = runtime.block_on(async {
        let service = Server { requests: Arc::new(requests) }
            .serve(rmcp::transport::io::stdio_pipes())
            .await
            .map_err(|error| McpError::Protocol(error.to_string()))?;
        service.waiting().await.map_err(|error| McpError::Protocol(error.to_string()))?;
        Ok(())
    });
    // A read of stdin that never ends must not keep the process.
    runtime.shutdown_background();
    // What is being judged is judged to its end: its children are ended in order, its result is kept.
    let _ = worker.join();
    served
}

/// One request on its way to the desk.
struct Job {
    verb: String,
    arguments: Value,
    reply: oneshot::Sender<Result<Answer, DeskError>>,
}

fn work(mut desk: Result<Box<dyn Desk>, String>, jobs: &Receiver<Job>) {
    for Job { verb, arguments, reply } in jobs {
        // Whoever asked and left before it was their turn wants nothing any more.
        if !reply.is_closed() {
            let answer = match &mut desk {
                Ok(desk) => call(desk.as_mut(), &verb, arguments),
                Err(reason) => Err(DeskError::Failed(reason.clone().into())),
            };
            let _ = reply.send(answer);
        }
    }
}

struct Server {
    requests: Arc<Sender<Job>>,
}

impl ServerHandler for Server {
    fn get_info(&self) -> ServerConfig {
        ServerConfig::new(ServerCapabilities::builder().enable_tools().build())
            .with_server_info(Implementation::new("autokernel", env!("CARGO_PKG_VERSION")))
            .with_instructions(INSTRUCTIONS)
    }

    async fn list_tools(
        &self,
        _request: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        let tools =
            verbs().into_iter().map(|verb| Tool::new(verb.name, verb.description, Arc::new(verb.schema)));
        Ok(ListToolsResult::with_all_items(tools.collect()))
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let (reply, answer) = oneshot::channel();
        let arguments = request.arguments.map_or_else(|| json!({}), Value::Object);
        let job = Job { verb: request.name.into_owned(), arguments, reply };
        let gone = || ErrorData::internal_error("the desk is closed", None);
        self.requests.send(job).map_err(|_| gone())?;
        Ok(match answer.await.map_err(|_| gone())? {
            Ok(answer) => {
                let mut result = CallToolResult::success(vec![ContentBlock::text(answer.text)]);
                result.structured_content = Some(answer.data).filter(Value::is_object);
                result
            }
            // What a mind can mend is a result that says so; an error of the protocol may never reach it.
            Err(error) => CallToolResult::error(vec![ContentBlock::text(error.to_string())]),
        }
        .into())
    }
}
