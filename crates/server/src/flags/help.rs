//! The text of `--help`.

use super::table::{FLAGS, Kind};
use super::value::accepted;

/// The text of `--help`: every flag with its spellings, what it takes, its default and what it does.
#[must_use]
pub fn help() -> String {
    let mut text = String::from("Usage: glimmer serve [MODEL] [FLAGS]\n\n");
    for flag in FLAGS {
        let mut names = vec![format!("--{}", flag.name)];
        names.extend(flag.aliases.iter().map(|&alias| alias.to_owned()));
        if flag.kind == Kind::Switch {
            names.push(format!("--no-{}", flag.name));
        }
        let takes = if flag.kind == Kind::Switch { String::new() } else { format!(" <{}>", accepted(flag.kind)) };
        let default = if flag.default == "null" { String::new() } else { format!(" [default: {}]", flag.default) };
        text.push_str(&format!("  {}{takes}\n      {}{default}\n", names.join(", "), flag.help));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_help_names_every_flag() {
        let text = help();
        assert!(FLAGS.iter().all(|flag| text.contains(&format!("  --{}", flag.name))));
        assert!(text.contains("--tensor-parallel-size, -tp <a whole number, 1 to 1024>"), "{text}");
        assert!(text.contains("--enable-prefix-caching, --no-enable-prefix-caching\n"), "{text}");
    }
}
