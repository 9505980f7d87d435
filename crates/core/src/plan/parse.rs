//! Reads expressions and launch arguments.

use crate::kernel_file::{Swizzle, caps};
use crate::words::nearest;

use super::expr::{Binary, DeviceField, Expr, Field, Function, Node, Unary, binding};
use super::lex::{Lexed, Token, lex};

/// Words that mean something in a header, so that nothing may be named after them.
pub const RESERVED: [&str; 10] =
    ["threads", "device", "min", "max", "ceildiv", "next_pow2", "tensor_map", "and", "or", "not"];

/// Why a text is no expression.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("column {column}: {kind}")]
pub struct ExprError {
    /// Character of the expression, counted from one, where the fault stands.
    pub column: usize,
    /// What is wrong.
    pub kind: ExprErrorKind,
}

/// What is wrong with an expression.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum ExprErrorKind {
    #[error("longer than {} bytes", caps::EXPR_BYTES)]
    TooLong,
    #[error("nested deeper than {} levels", caps::EXPR_DEPTH)]
    TooDeep,
    #[error("a name longer than {} characters", caps::NAME)]
    NameTooLong,
    #[error("a number larger than {}", i64::MAX)]
    NumberTooLarge,
    #[error("{found:?} has no meaning in an expression")]
    Character { found: char },
    #[error("`{found}` has no meaning here, write `{instead}`")]
    Instead { found: &'static str, instead: &'static str },
    #[error("expected {expected}, found {found}")]
    Expected { expected: &'static str, found: String },
    #[error("comparisons do not chain, join them with `and`")]
    Chain,
    #[error("`not` needs parentheses here")]
    Not,
    #[error("`threads` may only stand alone as an argument")]
    Threads,
    #[error("`tensor_map` may only stand alone as an argument")]
    TensorMap,
    #[error("`device` alone has no value, ask for device.sms, device.shared or device.cores")]
    Device,
    #[error("`{name}` is a function, call it")]
    NotCalled { name: &'static str },
    #[error("no function is called `{name}`, only ceildiv, min, max, next_pow2{}", hint(*.nearest))]
    Function { name: String, nearest: Option<&'static str> },
    #[error("{function} takes {takes}, not {got}")]
    Arity { function: &'static str, takes: &'static str, got: usize },
    #[error("nothing called `{name}` can be asked of {of}, only {known}{}", hint(*.nearest))]
    Attribute { of: &'static str, name: String, known: &'static str, nearest: Option<&'static str> },
    #[error("`{name}` takes no parentheses")]
    NoParentheses { name: String },
    #[error("`{name}` needs a dimension, as in {name}(0)")]
    NoDimension { name: String },
}

/// The tail of a message that has a guess.
fn hint(nearest: Option<&str>) -> String {
    nearest.map(|word| format!("; `{word}`?")).unwrap_or_default()
}

/// An argument of a launch as written.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Argument {
    Threads,
    TensorMap { tensor: String, extents: Vec<Expr>, swizzle: Swizzle },
    Expr(Expr),
}

/// Reads an expression.
pub(super) fn expression(text: &str) -> Result<Expr, ExprError> {
    let mut reader = Reader::new(text)?;
    let node = reader.expr(0)?;
    reader.end()?;
    checked(node)
}

/// Reads an argument: `threads`, `tensor_map(…)`, or an expression.
pub(crate) fn argument(text: &str) -> Result<Argument, ExprError> {
    let mut reader = Reader::new(text)?;
    match reader.peek() {
        Token::Word("threads") if reader.tokens.len() == 2 => Ok(Argument::Threads),
        Token::Word("tensor_map") => reader.tensor_map(),
        _ => {
            let node = reader.expr(0)?;
            reader.end()?;
            checked(node).map(Argument::Expr)
        }
    }
}

/// Canonical text may be longer than what was written; capping both means that every expression
/// that exists can be read back.
fn checked(node: Node) -> Result<Expr, ExprError> {
    if node.depth() > caps::EXPR_DEPTH {
        return Err(ExprError { column: 1, kind: ExprErrorKind::TooDeep });
    }
    if node.to_string().len() > caps::EXPR_BYTES {
        return Err(ExprError { column: 1, kind: ExprErrorKind::TooLong });
    }
    Ok(Expr(node))
}

struct Reader<'a> {
    tokens: Vec<Lexed<'a>>,
    next: usize,
    nesting: usize,
}

type Result<T, E = ExprError> = std::result::Result<T, E>;

impl<'a> Reader<'a> {
    fn new(text: &'a str) -> Result<Self> {
        Ok(Self { tokens: lex(text)?, next: 0, nesting: 0 })
    }

    // The last token is always `End` and is never passed.
    fn peek(&self) -> Token<'a> {
        self.tokens.get(self.next).map_or(Token::End, |lexed| lexed.token)
    }

    fn column(&self) -> usize {
        self.tokens.get(self.next).map_or(1, |lexed| lexed.column)
    }

    fn advance(&mut self) {
        self.next = (self.next + 1).min(self.tokens.len().saturating_sub(1));
    }

    fn fail<T>(&self, kind: ExprErrorKind) -> Result<T> {
        Err(ExprError { column: self.column(), kind })
    }

    fn expected<T>(&self, expected: &'static str) -> Result<T> {
        let found = match self.peek() {
            Token::Symbol("=") => return self.fail(ExprErrorKind::Instead { found: "=", instead: "==" }),
            Token::Symbol(symbol) => format!("`{symbol}`"),
            Token::Word(word) => format!("`{word}`"),
            Token::Int(value) => format!("`{value}`"),
            Token::End => "the end".to_owned(),
        };
        self.fail(ExprErrorKind::Expected { expected, found })
    }

    fn take(&mut self, symbol: &'static str) -> bool {
        let found = self.peek() == Token::Symbol(symbol);
        if found {
            self.advance();
        }
        found
    }

    fn demand(&mut self, symbol: &'static str, expected: &'static str) -> Result<()> {
        if self.take(symbol) { Ok(()) } else { self.expected(expected) }
    }

    fn end(&self) -> Result<()> {
        if self.peek() == Token::End { Ok(()) } else { self.expected("an operator or the end") }
    }

    fn operator(&self) -> Option<Binary> {
        let (Token::Symbol(text) | Token::Word(text)) = self.peek() else { return None };
        Binary::ALL.into_iter().find(|op| op.text() == text)
    }

    /// An expression whose operators bind at least as tightly as `at_least`.
    fn expr(&mut self, at_least: u8) -> Result<Node> {
        // A level of the tree opens at most two: one as an operand, one for its parentheses.
        if self.nesting > 2 * caps::EXPR_DEPTH {
            return self.fail(ExprErrorKind::TooDeep);
        }
        self.nesting += 1;
        let mut left = self.prefix(at_least)?;
        let mut compared = false;
        while let Some(op) = self.operator() {
            let binds = op.binds();
            if binds < at_least {
                break;
            }
            if binds == binding::COMPARISON {
                if compared {
                    return self.fail(ExprErrorKind::Chain);
                }
                compared = true;
            }
            self.advance();
            let right = self.expr(binds + 1)?;
            left = Node::Binary(op, Box::new(left), Box::new(right));
        }
        self.nesting -= 1;
        Ok(left)
    }

    fn prefix(&mut self, at_least: u8) -> Result<Node> {
        match self.peek() {
            Token::Word("not") if at_least > binding::NOT => self.fail(ExprErrorKind::Not),
            Token::Word("not") => {
                self.advance();
                Ok(Node::Unary(Unary::Not, Box::new(self.expr(binding::NOT)?)))
            }
            Token::Symbol("-") => {
                self.advance();
                Ok(Node::Unary(Unary::Neg, Box::new(self.expr(binding::SIGN)?)))
            }
            _ => self.atom(),
        }
    }

    fn atom(&mut self) -> Result<Node> {
        match self.peek() {
            Token::Int(value) => {
                self.advance();
                Ok(Node::Int(value))
            }
            Token::Symbol("(") => {
                self.advance();
                let inner = self.expr(0)?;
                self.demand(")", "`)`")?;
                Ok(inner)
            }
            Token::Word("threads") => self.fail(ExprErrorKind::Threads),
            Token::Word("tensor_map") => self.fail(ExprErrorKind::TensorMap),
            Token::Word(word @ ("and" | "or")) => {
                let found = format!("`{word}`");
                self.fail(ExprErrorKind::Expected { expected: "a value", found })
            }
            Token::Word(word) => self.word(word),
            _ => self.expected("a value"),
        }
    }

    fn word(&mut self, word: &str) -> Result<Node> {
        let column = self.column();
        let at = |kind| Err(ExprError { column, kind });
        let function = Function::ALL.into_iter().find(|function| function.name() == word);
        self.advance();
        if self.take("(") {
            if let Some(function) = function {
                return self.call(function, column);
            }
            let nearest = nearest(word, Function::ALL.map(Function::name));
            return at(ExprErrorKind::Function { name: word.to_owned(), nearest });
        }
        if let Some(function) = function {
            return at(ExprErrorKind::NotCalled { name: function.name() });
        }
        if self.take(".") {
            return if word == "device" { self.device_field() } else { self.tensor_field(word) };
        }
        if word == "device" {
            return at(ExprErrorKind::Device);
        }
        Ok(Node::Param(word.to_owned()))
    }

    fn call(&mut self, function: Function, column: usize) -> Result<Node> {
        let mut args = vec![];
        if !self.take(")") {
            loop {
                args.push(self.expr(0)?);
                if !self.take(",") {
                    break;
                }
            }
            self.demand(")", "`,` or `)`")?;
        }
        let (fits, takes) = match function {
            Function::Ceildiv => (args.len() == 2, "two values"),
            Function::Min | Function::Max => (args.len() >= 2, "two or more values"),
            Function::NextPow2 => (args.len() == 1, "one value"),
        };
        if fits {
            return Ok(Node::Call(function, args));
        }
        let kind = ExprErrorKind::Arity { function: function.name(), takes, got: args.len() };
        Err(ExprError { column, kind })
    }

    fn device_field(&mut self) -> Result<Node> {
        let Token::Word(word) = self.peek() else { return self.expected("sms, shared or cores") };
        let Some(field) = DeviceField::ALL.into_iter().find(|field| field.name() == word) else {
            let nearest = nearest(word, DeviceField::ALL.map(DeviceField::name));
            let known = "sms, shared, cores";
            return self.fail(ExprErrorKind::Attribute {
                of: "the device",
                name: word.to_owned(),
                known,
                nearest,
            });
        };
        self.advance();
        if self.peek() == Token::Symbol("(") {
            return self.fail(ExprErrorKind::NoParentheses { name: word.to_owned() });
        }
        Ok(Node::Device(field))
    }

    fn tensor_field(&mut self, tensor: &str) -> Result<Node> {
        const KNOWN: [&str; 5] = ["size", "stride", "numel", "itemsize", "dim"];
        let Token::Word(word) = self.peek() else {
            return self.expected("size(i), stride(i), numel, itemsize or dim");
        };
        if !KNOWN.contains(&word) {
            let nearest = if word == "shape" { Some("size") } else { nearest(word, KNOWN) };
            let known = "size(i), stride(i), numel, itemsize, dim";
            return self.fail(ExprErrorKind::Attribute {
                of: "a tensor",
                name: word.to_owned(),
                known,
                nearest,
            });
        }
        self.advance();
        let open = self.peek() == Token::Symbol("(");
        let field = match word {
            "size" | "stride" if !open => {
                return self.fail(ExprErrorKind::NoDimension { name: word.to_owned() });
            }
            "size" => Field::Size(self.dimension()?),
            "stride" => Field::Stride(self.dimension()?),
            _ if open => return self.fail(ExprErrorKind::NoParentheses { name: word.to_owned() }),
            "numel" => Field::Numel,
            "itemsize" => Field::Itemsize,
            _ => Field::Dim,
        };
        Ok(Node::Tensor(tensor.to_owned(), field))
    }

    fn dimension(&mut self) -> Result<i64> {
        self.demand("(", "`(`")?;
        let negative = self.take("-");
        let Token::Int(value) = self.peek() else { return self.expected("a whole number") };
        self.advance();
        self.demand(")", "`)`")?;
        Ok(if negative { -value } else { value })
    }

    fn tensor_map(&mut self) -> Result<Argument> {
        self.advance();
        self.demand("(", "`(`")?;
        let Token::Word(tensor) = self.peek() else { return self.expected("a tensor") };
        self.advance();
        self.demand(",", "`,`")?;
        self.keyword("box", "`box=[…]`")?;
        self.demand("[", "`[`")?;
        let mut extents = vec![];
        loop {
            extents.push(checked(self.expr(0)?)?);
            if !self.take(",") {
                break;
            }
        }
        self.demand("]", "`,` or `]`")?;
        let mut swizzle = Swizzle::None;
        if self.take(",") {
            self.keyword("swizzle", "`swizzle=…`")?;
            swizzle = match self.peek() {
                Token::Word("none") => Swizzle::None,
                Token::Int(32) => Swizzle::B32,
                Token::Int(64) => Swizzle::B64,
                Token::Int(128) => Swizzle::B128,
                _ => return self.expected("none, 32, 64 or 128"),
            };
            self.advance();
        }
        self.demand(")", "`,` or `)`")?;
        self.end()?;
        Ok(Argument::TensorMap { tensor: tensor.to_owned(), extents, swizzle })
    }

    fn keyword(&mut self, word: &'static str, expected: &'static str) -> Result<()> {
        if self.peek() != Token::Word(word) {
            return self.expected(expected);
        }
        self.advance();
        self.demand("=", expected)
    }
}

impl ExprErrorKind {
    /// A fault of one character, with the usual slips of other languages named.
    pub(super) fn character(rest: &str) -> Self {
        const SLIPS: [(&str, &str); 4] = [("&", "and"), ("|", "or"), ("!", "not"), ("^", "!=")];
        if rest.starts_with("//") {
            return Self::Instead { found: "//", instead: "/" };
        }
        match SLIPS.into_iter().find(|(found, _)| rest.starts_with(found)) {
            Some((found, instead)) => Self::Instead { found, instead },
            None => Self::Character { found: rest.chars().next().unwrap_or(' ') },
        }
    }
}
