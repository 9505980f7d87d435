//! What is written down for users agrees with the program.

use std::collections::BTreeSet;

use crate::program::{folder, program, run};

const README: &str = include_str!("../../../../README.md");
const EXIT: &str = include_str!("../../src/exit.rs");

fn help(arguments: &[&str]) -> String {
    let home = folder("help");
    let mut command = program(&home);
    command.args(arguments);
    let outcome = run(command).expect(0);
    assert!(outcome.stderr.is_empty(), "{}", outcome.told());
    outcome.stdout
}

/// The names under `Commands:`.
fn commands() -> Vec<String> {
    let help = help(&["--help"]);
    let list = help.split_once("Commands:\n").unwrap().1.split("\n\n").next().unwrap();
    // Deeper lines go on with the one before.
    let first = list.lines().filter_map(|line| line.strip_prefix("  ").filter(|rest| !rest.starts_with(' ')));
    let names = first.filter_map(|line| line.split_whitespace().next());
    names.filter(|name| *name != "help").map(str::to_owned).collect()
}

#[test]
fn every_command_has_help_and_is_in_the_readme() {
    let commands = commands();
    assert!(commands.len() >= 8, "{commands:?}");
    let table = README.split_once("## Commands").unwrap().1.split("Exit codes:").next().unwrap();
    for name in &commands {
        let help = help(&[name, "--help"]);
        assert!(help.contains(&format!("Usage: autokernel {name}")), "{help}");
        let listed = [format!("`{name}`"), format!("`{name} ")].iter().any(|words| table.contains(words));
        assert!(listed, "README's table lacks `{name}`");
    }
    for row in table.lines().filter(|line| line.starts_with("| `")) {
        for words in row.split('|').nth(1).unwrap().split('`').skip(1).step_by(2) {
            let name = words.split(' ').next().unwrap();
            assert!(commands.iter().any(|known| known == name), "README tells of `{name}`");
        }
    }
}

#[test]
fn options_of_the_readme_exist() {
    let optimize = help(&["optimize", "--help"]);
    for option in ["--yes", "--budget", "--out", "--threads", "--input", "--format"] {
        assert!(README.contains(option) && optimize.contains(option), "{option}");
    }
    assert!(help(&["--version"]).starts_with("autokernel "));
}

#[test]
fn exit_codes_of_the_readme_are_those_of_the_program() {
    let table = README.split_once("Exit codes:").unwrap().1.split("## ").next().unwrap();
    let rows = table.lines().filter_map(|line| line.strip_prefix("| ")?.split(' ').next()?.parse().ok());
    let told: BTreeSet<u8> = rows.collect();
    let body = EXIT.split_once("enum ExitCode {").unwrap().1.split('}').next().unwrap();
    let values = body.lines().filter_map(|line| line.split_once(" = ")?.1.trim_end_matches(',').parse().ok());
    let mut used: BTreeSet<u8> = values.collect();
    used.insert(0);
    assert!(used.len() > 8, "{used:?}");
    assert_eq!(told, used);
}
