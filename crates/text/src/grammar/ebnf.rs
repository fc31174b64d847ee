//! The other dialect of grammars, `root ::= "a" | [b-z]+`, rewritten in Lark.
//!
//! In this dialect every character is a symbol of the grammar; in Lark a lexer cuts text into terminals first, each as
//! long as possible. So as much as possible becomes one terminal: a rule that does not lead to recursion is a regular
//! expression as a whole, and of the others every run of symbols between references to recursive rules. Where two such runs
//! meet, the first takes all the text that it can.

use std::collections::HashMap;
use std::fmt::Write as _;

use glimmer_engine::constraint::ConstraintError;

use super::lark;

/// Deepest nesting of parentheses.
const MAX_DEPTH: usize = 24;
/// Largest bound of a repetition.
const MAX_REPEAT: u32 = 100_000;

/// Whether the text is of this dialect.
pub(super) fn is_ebnf(text: &str) -> bool {
    text.contains("::=")
}

/// The grammar in Lark.
pub(super) fn to_lark(text: &str) -> Result<String, ConstraintError> {
    let (root, rules) = to_rules(text, "")?;
    Ok(format!("start: {root}\n{rules}"))
}

/// Name of the root, and the rules; all names have the infix, letters and digits only.
pub(super) fn to_rules(text: &str, infix: &str) -> Result<(String, String), ConstraintError> {
    let grammar = Grammar::parse(text)?;
    let regular = grammar.regular();
    let mut writer = Writer { infix, regular: &regular, hoisted: 0, out: String::new() };
    for (index, rule) in grammar.rules.iter().enumerate() {
        let name = writer.name(index);
        let body = if regular[index] { writer.expression(rule) } else { writer.mixed(rule) };
        let _ = writeln!(writer.out, "{name}: {body}");
    }
    Ok((writer.name(grammar.root), writer.out))
}

#[derive(Debug, Clone, PartialEq)]
enum Node {
    Literal(String),
    /// A regular expression that matches one character.
    Character(String),
    Rule(usize),
    Sequence(Vec<Node>),
    Choice(Vec<Node>),
    Repeat(Box<Node>, u32, Option<u32>),
}

struct Grammar {
    rules: Vec<Node>,
    root: usize,
}

impl Grammar {
    fn parse(text: &str) -> Result<Self, ConstraintError> {
        let mut parser = Parser { text, at: 0, names: HashMap::new(), used: Vec::new() };
        let mut rules: Vec<Option<Node>> = Vec::new();
        let mut first = None;
        parser.space();
        while parser.at < text.len() {
            let Some(name) = parser.rule_name() else {
                return Err(parser.error("expected a rule, name ::= ..."));
            };
            let index = parser.index_of(&name);
            parser.space();
            let body = parser.choice(0)?;
            rules.resize(rules.len().max(parser.names.len()), None);
            if rules[index].replace(body).is_some() {
                return Err(parser.error(&format!("rule {name:?} is defined twice")));
            }
            first = first.or(Some(index));
        }
        let Some(first) = first else { return Err(parser.error("expected a rule, name ::= ...")) };
        let root = parser.names.get("root").copied().unwrap_or(first);
        rules.resize(parser.names.len(), None);
        let defined = rules.into_iter().zip(&parser.used).map(|(rule, (name, at))| {
            rule.ok_or_else(|| ConstraintError(format!("line {}: rule {name:?} is not defined", line(text, *at))))
        });
        Ok(Self { rules: defined.collect::<Result<_, _>>()?, root })
    }

    /// Which rules lead to no recursion.
    fn regular(&self) -> Vec<bool> {
        let mut waits = Vec::new();
        let mut users = vec![Vec::new(); self.rules.len()];
        for (index, rule) in self.rules.iter().enumerate() {
            let mut uses = Vec::new();
            references(rule, &mut uses);
            waits.push(uses.len());
            for used in uses {
                users[used].push(index);
            }
        }
        let mut regular = vec![false; self.rules.len()];
        let mut ready: Vec<usize> = (0..self.rules.len()).filter(|&index| waits[index] == 0).collect();
        while let Some(index) = ready.pop() {
            regular[index] = true;
            for &user in &users[index] {
                waits[user] -= 1;
                if waits[user] == 0 {
                    ready.push(user);
                }
            }
        }
        regular
    }
}

fn references(node: &Node, found: &mut Vec<usize>) {
    match node {
        Node::Rule(index) => found.push(*index),
        Node::Sequence(parts) | Node::Choice(parts) => parts.iter().for_each(|part| references(part, found)),
        Node::Repeat(inner, ..) => references(inner, found),
        Node::Literal(_) | Node::Character(_) => {}
    }
}

/// Line of a byte, from 1.
fn line(text: &str, at: usize) -> usize {
    text.as_bytes()[..at.min(text.len())].iter().filter(|&&byte| byte == b'\n').count() + 1
}

struct Parser<'t> {
    text: &'t str,
    at: usize,
    names: HashMap<String, usize>,
    /// The names by index, with the byte of their first use.
    used: Vec<(String, usize)>,
}

impl Parser<'_> {
    fn error(&self, problem: &str) -> ConstraintError {
        ConstraintError(format!("grammar, line {}: {problem}", line(self.text, self.at)))
    }

    fn rest(&self) -> &str {
        &self.text[self.at..]
    }

    fn take(&mut self, token: &str) -> bool {
        let found = self.rest().starts_with(token);
        if found {
            self.at += token.len();
        }
        found
    }

    /// Skips white space and comments.
    fn space(&mut self) {
        loop {
            let rest = self.rest();
            let trimmed = rest.trim_start();
            let skipped = rest.len() - trimmed.len();
            let comment = if trimmed.starts_with('#') { trimmed.find('\n').unwrap_or(trimmed.len()) } else { 0 };
            if skipped + comment == 0 {
                return;
            }
            self.at += skipped + comment;
        }
    }

    fn identifier(&self) -> Option<&str> {
        let part = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-' || c == '.';
        let rest = self.rest();
        let end = rest.find(|c| !part(c)).unwrap_or(rest.len());
        (end > 0 && !rest.starts_with(|c: char| c.is_ascii_digit() || c == '.' || c == '-')).then(|| &rest[..end])
    }

    /// The name in front of a `::=`, which is taken, too.
    fn rule_name(&mut self) -> Option<String> {
        let name = self.identifier()?.to_owned();
        let before = self.at;
        self.at += name.len();
        self.space();
        if self.take("::=") {
            return Some(name);
        }
        self.at = before;
        None
    }

    fn index_of(&mut self, name: &str) -> usize {
        if let Some(&index) = self.names.get(name) {
            return index;
        }
        let index = self.names.len();
        self.names.insert(name.to_owned(), index);
        self.used.push((name.to_owned(), self.at));
        index
    }

    fn choice(&mut self, depth: usize) -> Result<Node, ConstraintError> {
        if depth > MAX_DEPTH {
            return Err(self.error(&format!("parentheses nest deeper than {MAX_DEPTH}")));
        }
        let mut branches = vec![self.sequence(depth)?];
        while self.take("|") {
            branches.push(self.sequence(depth)?);
        }
        Ok(single(branches, Node::Choice))
    }

    fn sequence(&mut self, depth: usize) -> Result<Node, ConstraintError> {
        let mut parts = Vec::new();
        loop {
            self.space();
            let begin = self.at;
            if self.rule_name().is_some() {
                // The next rule begins.
                self.at = begin;
                break;
            }
            let Some(part) = self.item(depth)? else { break };
            let part = self.repeated(part)?;
            parts.push(part);
        }
        if parts.is_empty() {
            parts.push(Node::Literal(String::new()));
        }
        Ok(single(parts, Node::Sequence))
    }

    fn item(&mut self, depth: usize) -> Result<Option<Node>, ConstraintError> {
        let next = self.rest().chars().next();
        Ok(Some(match next {
            Some(quote @ ('"' | '\'')) => Node::Literal(self.string(quote)?),
            Some('[') => Node::Character(self.class()?),
            Some('.') => {
                self.at += 1;
                Node::Character("(?s:.)".to_owned())
            }
            Some('(') => {
                self.at += 1;
                if self.rest().starts_with('=') {
                    return Err(self.error("assertions about what follows, (= ...), are not supported"));
                }
                let inner = self.choice(depth + 1)?;
                if !self.take(")") {
                    return Err(self.error("expected `)`"));
                }
                inner
            }
            None | Some('|' | ')') => return Ok(None),
            Some(_) => match self.identifier().map(str::to_owned) {
                Some(name) => {
                    let index = self.index_of(&name);
                    self.at += name.len();
                    Node::Rule(index)
                }
                None => return Err(self.error(&format!("unexpected {:?}", next.unwrap_or(' ')))),
            },
        }))
    }

    fn repeated(&mut self, part: Node) -> Result<Node, ConstraintError> {
        let mut part = part;
        loop {
            let (least, most) = match self.rest().chars().next() {
                Some('*') => (0, None),
                Some('+') => (1, None),
                Some('?') => (0, Some(1)),
                Some('{') => {
                    let Some(end) = self.rest().find('}') else { return Err(self.error("expected `}`")) };
                    let inside = self.rest()[1..end].replace(char::is_whitespace, "");
                    let number = |text: &str| text.parse::<u32>().ok().filter(|&n| n <= MAX_REPEAT);
                    let bounds = match inside.split_once(',') {
                        None => number(&inside).map(|n| (n, Some(n))),
                        Some((least, "")) => number(least).map(|n| (n, None)),
                        Some((least, most)) => number(if least.is_empty() { "0" } else { least })
                            .zip(number(most))
                            .filter(|(least, most)| least <= most)
                            .map(|(least, most)| (least, Some(most))),
                    };
                    let Some(bounds) = bounds else {
                        return Err(self.error(&format!("{{{inside}}} is not a repetition like {{2,5}}")));
                    };
                    self.at += end;
                    bounds
                }
                _ => return Ok(part),
            };
            self.at += 1;
            part = Node::Repeat(Box::new(part), least, most);
        }
    }

    fn string(&mut self, quote: char) -> Result<String, ConstraintError> {
        self.at += 1;
        let mut text = String::new();
        loop {
            match self.character()? {
                (c, false) if c == quote => return Ok(text),
                ('\n', false) => return Err(self.error("a string is not closed on its line")),
                (c, _) => text.push(c),
            }
        }
    }

    /// A class like `[^a-z\n]`, as a regular expression.
    fn class(&mut self) -> Result<String, ConstraintError> {
        self.at += 1;
        let mut out = String::from(if self.take("^") { "[^" } else { "[" });
        let begin = out.len();
        loop {
            if self.take("]") {
                if out.len() == begin {
                    return Err(self.error("a class of characters is empty"));
                }
                out.push(']');
                return Ok(out);
            }
            let named = ["\\d", "\\w", "\\s", "\\D", "\\W", "\\S"].into_iter().find(|name| self.take(name));
            if let Some(name) = named {
                out += name;
                continue;
            }
            let (low, _) = self.character()?;
            let range = self.rest().starts_with('-') && !self.rest().starts_with("-]");
            let high = if range {
                self.at += 1;
                self.character()?.0
            } else {
                low
            };
            if high < low {
                return Err(self.error(&format!("the range {low:?} to {high:?} is empty")));
            }
            // Writing to a string does not fail.
            let _ = write!(out, "\\x{{{:x}}}-\\x{{{:x}}}", u32::from(low), u32::from(high));
        }
    }

    /// The next character of a string or class, and whether it was written with a backslash.
    fn character(&mut self) -> Result<(char, bool), ConstraintError> {
        let Some(c) = self.rest().chars().next() else {
            return Err(self.error("the grammar ends inside a string or class"));
        };
        self.at += c.len_utf8();
        if c != '\\' {
            return Ok((c, false));
        }
        let Some(kind) = self.rest().chars().next() else {
            return Err(self.error("the grammar ends behind a backslash"));
        };
        self.at += kind.len_utf8();
        let digits = match kind {
            'n' => return Ok(('\n', true)),
            'r' => return Ok(('\r', true)),
            't' => return Ok(('\t', true)),
            'b' => return Ok(('\x08', true)),
            'f' => return Ok(('\x0c', true)),
            '0' => return Ok(('\0', true)),
            'x' => 2,
            'u' => 4,
            'U' => 8,
            c if c.is_ascii_alphanumeric() => return Err(self.error(&format!("unknown escape \\{c}"))),
            c => return Ok((c, true)),
        };
        let code = self.rest().get(..digits).and_then(|hex| u32::from_str_radix(hex, 16).ok()).and_then(char::from_u32);
        let Some(code) = code else {
            return Err(self.error(&format!("expected {digits} hexadecimal digits of a character behind \\{kind}")));
        };
        self.at += digits;
        Ok((code, true))
    }
}

fn single(mut parts: Vec<Node>, make: impl FnOnce(Vec<Node>) -> Node) -> Node {
    if parts.len() == 1 { parts.remove(0) } else { make(parts) }
}

struct Writer<'g> {
    infix: &'g str,
    regular: &'g [bool],
    hoisted: usize,
    out: String,
}

impl Writer<'_> {
    fn name(&self, index: usize) -> String {
        if self.regular[index] {
            format!("T{}_{index}", self.infix.to_ascii_uppercase())
        } else {
            format!("r{}_{index}", self.infix)
        }
    }

    fn is_regular(&self, node: &Node) -> bool {
        let mut used = Vec::new();
        references(node, &mut used);
        used.into_iter().all(|index| self.regular[index])
    }

    /// A node all of whose references may be written by name.
    fn expression(&self, node: &Node) -> String {
        let each = |parts: &[Node]| parts.iter().map(|part| self.expression(part)).collect::<Vec<_>>();
        match node {
            Node::Literal(text) => lark::literal(text),
            Node::Character(pattern) => lark::regex(pattern),
            Node::Rule(index) => self.name(*index),
            Node::Sequence(parts) => each(parts).join(" "),
            Node::Choice(parts) => format!("({})", each(parts).join(" | ")),
            Node::Repeat(inner, least, most) => format!("({}){}", self.expression(inner), bounds(*least, *most)),
        }
    }

    /// A node of a recursive rule: what is regular in it becomes terminals.
    fn mixed(&mut self, node: &Node) -> String {
        if self.is_regular(node) {
            return self.terminal(node);
        }
        match node {
            Node::Sequence(parts) => {
                let mut words = Vec::new();
                let mut rest = parts.as_slice();
                while let Some(first) = rest.first() {
                    let run = rest.iter().take_while(|part| self.is_regular(part)).count();
                    if run == 0 {
                        words.push(self.mixed(first));
                        rest = &rest[1..];
                    } else {
                        let run_node = single(rest[..run].to_vec(), Node::Sequence);
                        words.push(self.terminal(&run_node));
                        rest = &rest[run..];
                    }
                }
                words.join(" ")
            }
            Node::Choice(parts) => {
                let branches: Vec<String> = parts.iter().map(|part| self.mixed(part)).collect();
                format!("({})", branches.join(" | "))
            }
            Node::Repeat(inner, least, most) => format!("({}){}", self.mixed(inner), bounds(*least, *most)),
            Node::Literal(_) | Node::Character(_) | Node::Rule(_) => self.expression(node),
        }
    }

    /// A regular node as one terminal.
    fn terminal(&mut self, node: &Node) -> String {
        if matches!(node, Node::Literal(_) | Node::Character(_) | Node::Rule(_)) {
            return self.expression(node);
        }
        let body = self.expression(node);
        let name = format!("H{}_{}", self.infix.to_ascii_uppercase(), self.hoisted);
        self.hoisted += 1;
        let _ = writeln!(self.out, "{name}: {body}");
        name
    }
}

fn bounds(least: u32, most: Option<u32>) -> String {
    match (least, most) {
        (0, None) => "*".to_owned(),
        (1, None) => "+".to_owned(),
        (0, Some(1)) => "?".to_owned(),
        (least, None) => format!("{{{least},}}"),
        (least, Some(most)) => format!("{{{least},{most}}}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_recursive_is_a_terminal() {
        let lark = to_lark("root ::= \"a\" word # note\nword ::= [a-z]+ |\n  \"x\\n\"").unwrap();
        let word = r#"T_1: ((/[\x{61}-\x{7a}]/)+ | "x\n")"#;
        assert_eq!(lark, format!("start: T_0\nT_0: \"a\" T_1\n{word}\n"));
    }

    #[test]
    fn runs_between_recursive_references_are_terminals() {
        let lark = to_lark("root ::= \"(\" ws root ws \")\" | \"x\"\nws ::= \" \"*").unwrap();
        assert_eq!(lark, "start: r_0\nH_0: \"(\" T_1\nH_1: T_1 \")\"\nr_0: (H_0 r_0 H_1 | \"x\")\nT_1: (\" \")*\n");
    }

    #[test]
    fn errors_name_the_line() {
        for (text, part) in [
            ("root ::= a\n\nb ::= \"x\"", "line 1: rule \"a\" is not defined"),
            ("root ::= \"x\nb ::= \"x\"", "line 2: a string is not closed"),
            ("root ::= (\"x\"", "line 1: expected `)`"),
            ("root ::= [z-a]", "the range"),
            ("root ::= \"a\"{5,2}", "{5,2} is not a repetition"),
            ("root ::= \"a\"\nroot ::= \"b\"", "defined twice"),
            ("root ::= (= \"a\")", "not supported"),
            ("::=", "expected a rule"),
        ] {
            let error = to_lark(text).unwrap_err().0;
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
