//! Reads the imports of a crate from its source text.
//!
//! In: the root file of a crate (`lib.rs` or `main.rs`). Out: every file that belongs to it outside of tests, and for
//! each the files that it names: by `use`, by a path in code, or by a path in a macro's arguments.
//! Never: it runs no compiler, so a name that a macro makes is not seen.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use syn::visit::Visit;

/// A path of names from the root of the crate, such as `["cache", "store"]`.
pub(crate) type ModulePath = Vec<String>;

/// One crate: its modules and what each names.
pub(crate) struct Crate {
    modules: BTreeMap<ModulePath, Module>,
}

struct Module {
    /// Modules within one file share it.
    file: PathBuf,
    /// The path that each imported name resolves to, renamed or not.
    aliases: BTreeMap<String, ModulePath>,
    /// All `use mine::*`.
    globs: Vec<ModulePath>,
    /// All paths that the module names, from the root of the crate.
    named: BTreeSet<ModulePath>,
}

impl Crate {
    pub(crate) fn read(root: &Path) -> Self {
        let mut modules = BTreeMap::new();
        let directory = root.parent().unwrap();
        read_file(root, directory, &[], &mut modules);
        Self { modules }
    }

    pub(crate) fn files(&self) -> BTreeSet<&Path> {
        self.modules.values().map(|module| module.file.as_path()).collect()
    }

    /// For each file the other files of the crate that it names.
    pub(crate) fn file_imports(&self) -> BTreeMap<PathBuf, BTreeSet<PathBuf>> {
        self.graph(|_, module| module.file.clone())
    }

    /// For each top-level module the other ones that it names. The root itself is left out: it only hands names on.
    pub(crate) fn top_level_imports(&self) -> BTreeMap<String, BTreeSet<String>> {
        let mut graph = self.graph(|path, _| path.first().cloned().unwrap_or_default());
        graph.remove("");
        for imports in graph.values_mut() {
            imports.remove("");
        }
        graph
    }

    fn graph<N: Ord + Clone>(&self, node: impl Fn(&ModulePath, &Module) -> N) -> BTreeMap<N, BTreeSet<N>> {
        let mut graph: BTreeMap<N, BTreeSet<N>> = BTreeMap::new();
        for (path, module) in &self.modules {
            let from = node(path, module);
            let imports = graph.entry(from.clone()).or_default();
            for named in &module.named {
                let Some(owner) = self.owner(named, 0) else { continue };
                let to = node(&owner, &self.modules[&owner]);
                if to != from {
                    imports.insert(to);
                }
            }
        }
        graph
    }

    /// The module that defines what a path names. A name that a module hands on belongs to the module it comes from.
    fn owner(&self, path: &[String], depth: usize) -> Option<ModulePath> {
        let length = (0..=path.len()).rev().find(|length| self.modules.contains_key(&path[..*length]))?;
        let (module, rest) = path.split_at(length);
        let declared = &self.modules[module];
        if let Some(name) = rest.first().filter(|_| depth < 8) {
            if let Some(alias) = declared.aliases.get(name) {
                let target: ModulePath = alias.iter().chain(&rest[1..]).cloned().collect();
                if target != path {
                    return self.owner(&target, depth + 1);
                }
            }
            for glob in &declared.globs {
                let names = self.modules.get(glob);
                if names.is_some_and(|names| names.aliases.contains_key(name)) {
                    let target: ModulePath = glob.iter().chain(rest).cloned().collect();
                    return self.owner(&target, depth + 1);
                }
            }
        }
        Some(module.to_vec())
    }
}

/// The largest set of nodes of which each reaches each other one; one node alone is no circle.
pub(crate) fn largest_circle<N: Ord + Clone>(graph: &BTreeMap<N, BTreeSet<N>>) -> Vec<N> {
    let reach: BTreeMap<&N, BTreeSet<&N>> = graph.keys().map(|node| (node, reachable(graph, node))).collect();
    let circle_of = |node: &N| -> Vec<N> {
        let both = |other: &&N| reach[node].contains(*other) && reach[*other].contains(node);
        graph.keys().filter(both).cloned().collect()
    };
    graph.keys().map(circle_of).max_by_key(Vec::len).unwrap_or_default()
}

fn reachable<'g, N: Ord>(graph: &'g BTreeMap<N, BTreeSet<N>>, from: &N) -> BTreeSet<&'g N> {
    let mut seen = BTreeSet::new();
    let mut open: Vec<&N> = graph[from].iter().collect();
    while let Some(node) = open.pop() {
        if seen.insert(node) {
            open.extend(graph.get(node).into_iter().flatten());
        }
    }
    seen
}

fn read_file(file: &Path, directory: &Path, path: &[String], modules: &mut BTreeMap<ModulePath, Module>) {
    let text = std::fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    let parsed = syn::parse_file(&text).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    read_items(&parsed.items, file, directory, path, modules);
}

fn read_items(
    items: &[syn::Item],
    file: &Path,
    directory: &Path,
    path: &[String],
    modules: &mut BTreeMap<ModulePath, Module>,
) {
    let children = child_modules(items);
    let mut reader = Reader { path: path.to_vec(), children, module: Module::new(file) };
    for item in items.iter().filter(|item| !is_for_tests(attributes(item))) {
        if let syn::Item::Mod(child) = item {
            let name = child.ident.to_string();
            let child_path: ModulePath = path.iter().cloned().chain([name.clone()]).collect();
            let child_directory = directory.join(&name);
            match &child.content {
                Some((_, items)) => read_items(items, file, &child_directory, &child_path, modules),
                None => {
                    let flat = directory.join(format!("{name}.rs"));
                    let found = if flat.exists() { flat } else { child_directory.join("mod.rs") };
                    read_file(&found, &child_directory, &child_path, modules);
                }
            }
        } else {
            reader.visit_item(item);
        }
    }
    modules.insert(path.to_vec(), reader.module);
}

fn child_modules(items: &[syn::Item]) -> BTreeSet<String> {
    items
        .iter()
        .filter_map(|item| match item {
            syn::Item::Mod(child) => Some(child.ident.to_string()),
            _ => None,
        })
        .collect()
}

fn attributes(item: &syn::Item) -> &[syn::Attribute] {
    match item {
        syn::Item::Mod(item) => &item.attrs,
        syn::Item::Fn(item) => &item.attrs,
        syn::Item::Use(item) => &item.attrs,
        syn::Item::Impl(item) => &item.attrs,
        syn::Item::Struct(item) => &item.attrs,
        syn::Item::Const(item) => &item.attrs,
        _ => &[],
    }
}

fn is_for_tests(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && attribute.meta.require_list().is_ok_and(|list| list.tokens.to_string().starts_with("test"))
    })
}

impl Module {
    fn new(file: &Path) -> Self {
        Self { file: file.to_owned(), aliases: BTreeMap::new(), globs: Vec::new(), named: BTreeSet::new() }
    }
}

struct Reader {
    path: ModulePath,
    children: BTreeSet<String>,
    module: Module,
}

impl Reader {
    /// The path from the root of the crate; `None` for what belongs to another crate, or to this module itself.
    fn absolute(&self, segments: &[String]) -> Option<ModulePath> {
        let mut base = match segments.first()?.as_str() {
            "crate" => Vec::new(),
            "self" => self.path.clone(),
            "super" => self.path.clone(),
            child if self.children.contains(child) => {
                return Some(self.path.iter().chain(segments).cloned().collect());
            }
            _ => return None,
        };
        let mut rest = segments;
        if rest[0] != "super" {
            rest = &rest[1..];
        }
        while rest.first().is_some_and(|segment| segment == "super") {
            base.pop();
            rest = &rest[1..];
        }
        Some(base.into_iter().chain(rest.iter().cloned()).collect())
    }

    fn add(&mut self, segments: &[String]) {
        if let Some(path) = self.absolute(segments) {
            self.module.named.insert(path);
        }
    }

    fn read_use(&mut self, tree: &syn::UseTree, prefix: &[String]) {
        let with = |name: &syn::Ident| -> Vec<String> { prefix.iter().cloned().chain([name.to_string()]).collect() };
        match tree {
            syn::UseTree::Path(path) => self.read_use(&path.tree, &with(&path.ident)),
            syn::UseTree::Group(group) => group.items.iter().for_each(|item| self.read_use(item, prefix)),
            syn::UseTree::Name(name) if name.ident == "self" => {
                self.alias(prefix, prefix.last().unwrap().clone());
            }
            syn::UseTree::Name(name) => self.alias(&with(&name.ident), name.ident.to_string()),
            syn::UseTree::Rename(rename) => self.alias(&with(&rename.ident), rename.rename.to_string()),
            syn::UseTree::Glob(_) => {
                self.add(prefix);
                if let Some(path) = self.absolute(prefix) {
                    self.module.globs.push(path);
                }
            }
        }
    }

    fn alias(&mut self, segments: &[String], name: String) {
        self.add(segments);
        if let Some(path) = self.absolute(segments) {
            self.module.aliases.insert(name, path);
        }
    }

    fn read_tokens(&mut self, tokens: proc_macro2::TokenStream) {
        let mut path: Vec<String> = Vec::new();
        let mut colons = 0;
        for token in tokens {
            match token {
                proc_macro2::TokenTree::Ident(name) => {
                    if colons != 2 {
                        self.add(&path);
                        path.clear();
                    }
                    path.push(name.to_string());
                    colons = 0;
                }
                proc_macro2::TokenTree::Punct(punct) if punct.as_char() == ':' => colons += 1,
                other => {
                    self.add(&path);
                    path.clear();
                    colons = 0;
                    if let proc_macro2::TokenTree::Group(group) = other {
                        self.read_tokens(group.stream());
                    }
                }
            }
        }
        self.add(&path);
    }
}

impl<'ast> Visit<'ast> for Reader {
    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        self.read_use(&item.tree, &[]);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let segments: Vec<String> = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        self.add(&segments);
        syn::visit::visit_path(self, path);
    }

    fn visit_visibility(&mut self, _: &'ast syn::Visibility) {
        // `pub(crate)` and `pub(in path)` name no import.
    }

    fn visit_attribute(&mut self, _: &'ast syn::Attribute) {}

    fn visit_macro(&mut self, item: &'ast syn::Macro) {
        self.read_tokens(item.tokens.clone());
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        if !is_for_tests(&item.attrs) {
            syn::visit::visit_item_fn(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if !is_for_tests(&item.attrs) {
            syn::visit::visit_impl_item_fn(self, item);
        }
    }
}
